"""Show a comparison of two runs as a table (rich) and a verdict.

In: a `RunComparison`. Out: text; '-' for a missing figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.table import Table

from ft_plugins.report.recovery_phases import WORDS

from .bubble_use import CopyTraffic
from .comparison import RunComparison


def table(report: RunComparison) -> Table:
    """The report for a terminal."""
    target = "one node" if "lost" in report.killed else "one process"
    grid = Table(title=f"One job, run twice: without a failure, and with {target} killed")
    grid.add_column("")
    grid.add_column("unfailed", justify="right")
    grid.add_column("killed once", justify="right", style="bold")
    seconds, source = report.seconds, report.restored_from
    restored = "-" if source is None else f"iteration {source.iteration} (lineage {source.lineage}, {source.tier} tier)"
    for row in (
        ("iterations", str(report.iterations_unfailed), str(report.iterations)),
        ("loss at the end", f"{report.final_loss_unfailed:.6f}", f"{report.final_loss:.6f}"),
        ("wall time", _s(report.wall_seconds_unfailed), _s(report.wall_seconds)),
        ("snapshot stall per iteration", _s(report.snapshot_stall_seconds_unfailed), _s(report.snapshot_stall_seconds)),
        ("snapshot sealed after", "", _s(report.snapshot_seconds)),
        ("versions sealed by all ranks", "", str(report.snapshots)),
        ("host memory for snapshots", "", _memory(report)),
        ("restored from", "", restored),
        ("iterations lost", "", "-" if report.iterations_lost is None else str(report.iterations_lost)),
        ("to detect the failure", "", _s(seconds.detect)),
        ("to restart the ranks", "", _s(seconds.restart)),
        ("to load the state", "", _s(seconds.load)),
        ("kill to an iteration computed again", "", _s(seconds.proof)),
        ("kill to next iteration done", "", _s(seconds.down)),
        *_phase_rows(report),
        *_bubble_rows(report),
        ("every iteration", "", "identical" if report.identical else "DIFFERS"),
    ):
        grid.add_row(*row)
    return grid


def verdict(report: RunComparison) -> str:
    """The result in one or two sentences."""
    if report.proven:
        return (
            "Both runs had identical batches, parameters and optimizer state in every iteration, bit for bit: after a "
            f"SIGKILL of {report.victim} and one restore from memory."
        )
    if report.identical:
        return "Both runs had identical state, but survival is not proven: " + "; ".join(report.unproven) + "."
    return "The two runs are NOT identical: " + "; ".join(report.unproven) + "."


def _phase_rows(report: RunComparison) -> Iterable[tuple[str, str, str]]:
    for name, seconds in (report.phases.phases if report.phases else {}).items():
        if seconds is not None:
            yield f"  {WORDS[name]}", "", _s(seconds)


def _bubble_rows(report: RunComparison) -> Iterable[tuple[str, str, str]]:
    both = (report.bubbles_unfailed, report.bubbles)
    if not any(both):
        return

    def row(name: str, show: Callable[[CopyTraffic], str]) -> tuple[str, str, str]:
        left, right = ("-" if one is None else show(one) for one in both)
        return name, left, right

    yield row("bubbles, share of an iteration", lambda one: f"{one.idle_share:.0%}")
    yield row(
        "a version committed every",
        lambda one: "-" if one.iterations_per_version is None else f"{one.iterations_per_version:.1f} iter.",
    )
    yield row(
        "copy bytes sent in their bubble",
        lambda one: "-" if one.in_bubble_share is None else f"{one.in_bubble_share:.0%}",
    )


def _s(value: float | None) -> str:
    """Seconds as text, in s or ms; '-' for None."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{value * 1000:.2f} ms"


def _memory(report: RunComparison) -> str:
    if report.host_memory_bytes is None:
        return "-"
    shown = f"{report.host_memory_bytes / 2**20:.1f} MiB"
    if report.captured_bytes:
        shown += f" ({report.host_memory_bytes / report.captured_bytes:.2f} x the state)"
    return shown
