"""Show the phases of recoveries: a row for each phase, a column for each restart.

In: `RecoveryPhases`. Out: lines of at most 80 columns; '-' for a phase that is unknown or did not occur.
"""

from __future__ import annotations

from collections.abc import Sequence

from .recovery_phases import RecoveryPhases

WORDS = {
    "attempts": "earlier attempts",
    "detect": "detect the failure",
    "end": "end old processes",
    "agree": "agree on a round",
    "start": "start processes",
    "imports": "import",
    "groups": "make process groups",
    "build": "build the model",
    "load": "load the state",
    "iteration": "first iteration",
}
_SHOWN = 5  # columns


def phase_lines(recoveries: Sequence[RecoveryPhases]) -> list[str]:
    """The newest recoveries, in seconds; a phase that none of them has is left out."""
    shown = recoveries[-_SHOWN:]
    rows = [("seconds, by restart", [str(one.restart) for one in shown])]
    for name, words in WORDS.items():
        values = [one.by_phase()[name] for one in shown]
        if name != "attempts" or any(value is not None for value in values):
            rows.append((words, [_seconds(value) for value in values]))
    unknown = any(one.detect is None for one in shown)
    total = "total, from detection" if unknown else "total"
    rows.append((total, [_seconds(one.total) for one in shown]))
    rows.append(("iteration completed", [str(one.iteration) for one in shown]))
    if any(one.processor for one in shown):
        rows.append(("processor s to load", [_seconds(sum(one.processor.values()) or None) for one in shown]))
        rows.append(("of ranks", [str(one.ranks) for one in shown]))
    return [f"{words:<24}{''.join(f'{value:>11}' for value in values)}" for words, values in rows]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
