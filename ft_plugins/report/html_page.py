"""A job on one page of HTML: goodput, a timeline, restarts by phase, snapshots, exchange, synchronisations, memory.

Invariant: the page is whole in itself: no script, no network, pictures are inline SVG. Every text from an event is
escaped. Each figure comes from events; what they do not hold is said to be unknown or left out by name.

In: a title and the events of one or more nodes. Out: a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from time import gmtime, strftime

from ..errors import printable
from ..events import Event, Severity, catalogue
from .goodput import PARTS, Goodput, goodput, trained, words_of
from .recovery_phases import WORDS, RecoveryPhases, proof_lines, recovery_phases

_COLOURS = dict(zip(PARTS, (
    "#0b6fb8", "#d98e04", "#c0508f", "#c8322b", "#b5651d", "#8a5ab3", "#5d3a8e", "#e0574f", "#a03a63", "#8c6d1f",
    "#d4a017", "#17a2b8", "#4d5fc1", "#3aa0e0", "#008f7a", "#6a8f00", "#2c8a4b", "#8b1e1e", "#4a545c", "#9aa6af",
), strict=True))  # fmt: skip
_GREEN, _RED = "#2c8a4b", "#c8322b"
_WIDTH = 960.0  # of a picture, in its own units
_SHOWN = 200  # rows of a table, the newest
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f22; --paper: #fff; --line: #d5dade; --soft: #5b6770; --band: #f3f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #15181b; --line: #3a4148; --soft: #9aa6af; --band: #1e2327 } }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.big { font-size: 2.2rem; font-weight: 600; line-height: 1.2 } .soft { color: var(--soft) }
svg { display: block; width: 100%; margin: .2rem 0 }
svg .frame { fill: var(--band) } .bar { height: 2.2rem } .row { height: 1.6rem } .chart { height: 7rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td, th { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right; white-space: nowrap }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .9rem; margin-top: .4rem }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: 2px }
""".strip()


def html_page(title: str, events: Iterable[Event]) -> str:
    """The page."""
    ordered = sorted(events, key=lambda event: event.time)
    return "\n".join(_page(title, ordered)) + "\n"


def _page(title: str, events: Sequence[Event]) -> Iterator[str]:
    yield f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>"
    time, recoveries = goodput(events), recovery_phases(events)
    if time is None:
        yield "<p>There are no events.</p></body></html>"
        return
    nodes = sorted({event.node for event in events})
    yield f'<p class="soft">{_when(events[0].time)} to {_when(events[-1].time)} UTC; {_text(", ".join(nodes))}</p>'
    yield from _goodput(time)
    yield from _timeline(events)
    yield from _restarts(recoveries)
    yield from (f"<p>{_text(line)}</p>" for line in proof_lines(events))
    yield from _captures(events)
    yield from _others(events)
    yield from _failures(events)
    yield "</body></html>"


def _text(value: object) -> str:
    return escape(printable(str(value)))


def _when(time: float) -> str:
    return strftime("%Y-%m-%d %H:%M:%S", gmtime(time))


def _goodput(time: Goodput) -> Iterator[str]:
    ratio = "unknown" if time.ettr is None else f"{100 * time.ettr:.1f} %"
    yield f'<h2>Goodput</h2><div class="big">{ratio}</div>'
    until = "" if time.ended else ", until the newest event"
    yield f'<p class="soft">of {time.wall / 1e6:,.1f} s{until}, seen by node {_text(time.node)}</p>'
    parts = [(name, value) for name, value in time.parts.items() if value]
    yield from _bar([(name, words_of(name), value / 1e6) for name, value in parts])
    if time.unseen:
        yield f"<p>Failures that were noticed at an unknown time after they happened: {time.unseen}.</p>"
    if time.slow:
        yield f"<p>Slow, which is within training: rank {', '.join(map(str, time.slow))}.</p>"


def _bar(parts: Sequence[tuple[str, str, float]]) -> Iterator[str]:
    """A bar of parts, and a key with their seconds. In: name, words and seconds of each."""
    total, at = sum(seconds for _, _, seconds in parts) or 1.0, 0.0
    yield _svg("bar", "parts of the time")
    for name, words, seconds in parts:
        yield _box(at, _WIDTH * seconds / total, _COLOURS[name], words)
        at += _WIDTH * seconds / total
    yield '</svg><p class="key">'
    for name, words, seconds in parts:
        yield f'<span><i style="background:{_COLOURS[name]}"></i>{_text(words)} {seconds:,.2f} s</span>'
    yield "</p>"


def _svg(kind: str, words: str) -> str:
    """The begin of a picture that is stretched to its place; texts stand outside of it."""
    size = f'viewBox="0 0 {_WIDTH:.0f} 100" preserveAspectRatio="none"'
    frame = f'<rect class="frame" width="{_WIDTH:.0f}" height="100"/>'
    return f'<svg class="{kind}" {size} role="img" aria-label="{_text(words)}">{frame}'


def _box(left: float, width: float, colour: str, words: str, top: float = 0.0) -> str:
    """A rectangle from `top` to the bottom of a picture."""
    where = f'x="{left:.2f}" width="{width:.2f}" y="{top:.2f}" height="{100 - top:.2f}"'
    return f'<rect {where} fill="{colour}"><title>{_text(words)}</title></rect>'


def _timeline(events: Sequence[Event]) -> Iterator[str]:
    """Per node when its ranks trained, and marks where something failed."""
    begin, length = events[0].time, (events[-1].time - events[0].time) or 1.0
    yield "<h2>Incarnations</h2>"
    failures = (catalogue.WORKER_FAILED, catalogue.WORKERS_KILLED, catalogue.ROUND_ENDED)
    for node in sorted({event.node for event in events}):
        own = [event for event in events if event.node == node]
        yield f'<div class="soft">{_text(node)}</div>{_svg("row", f"incarnations of {node}")}'
        for since, until in trained(own):
            yield _box(_WIDTH * (since - begin) / length, _WIDTH * (until - since) / length, _GREEN, "trains")
        for event in own:
            if event.type in failures:
                yield _box(min(_WIDTH - 3, _WIDTH * (event.time - begin) / length), 3, _RED, event.name)
        yield "</svg>"
    yield f'<p class="key"><span><i style="background:{_GREEN}"></i>trains</span>'
    yield f'<span><i style="background:{_RED}"></i>a failure, or ranks that are killed for it</span></p>'


def _restarts(recoveries: Sequence[RecoveryPhases]) -> Iterator[str]:
    yield "<h2>Restarts</h2>"
    if not recoveries:
        yield "<p>No restart has completed an iteration.</p>"
    if len(recoveries) > _SHOWN:
        yield f"<p>The newest {_SHOWN} of {len(recoveries)}.</p>"
    for number, one in list(enumerate(recoveries, 1))[-_SHOWN:]:
        since = "" if one.phases["detect"] is not None else ", from detection"
        yield f"<p>Restart {number}, to iteration {one.iteration}: {one.total:.2f} s{since}</p>"
        yield from _bar([(name, WORDS[name], seconds) for name, seconds in one.phases.items() if seconds])


def _captures(events: Sequence[Event]) -> Iterator[str]:
    """How long captures took, over time; the single ones that are still held."""
    sealed = [event for event in events if event.type is catalogue.SNAPSHOT_SEALED]
    yield "<h2>Snapshots</h2>"
    if not sealed:
        yield "<p>Unknown: no single snapshot is in the events.</p>"
        return
    begin, length = sealed[0].time, (sealed[-1].time - sealed[0].time) or 1.0
    highest = max(event.fields["seconds"] for event in sealed) or 1.0
    slowest: dict[int, float] = {}  # by column
    for event in sealed:
        column = round(240 * (event.time - begin) / length)
        slowest[column] = max(slowest.get(column, 0.0), event.fields["seconds"])
    yield _svg("chart", "seconds of captures over time")
    for at, value in sorted(slowest.items()):
        yield _box(
            4 * at * (_WIDTH - 4) / _WIDTH, 3, _COLOURS["training"], f"{value:.4f} s", 100 - 100 * value / highest
        )
    yield f"</svg><p>The slowest of all ranks over the time from {_when(begin)} on; up to {highest:.3f} s.</p>"
    nbytes = sum(event.fields["bytes"] for event in sealed)
    yield f"<p>{len(sealed)} captures, {nbytes / 2**20:,.1f} MiB, of those that are held one by one.</p>"


def _others(events: Sequence[Event]) -> Iterator[str]:
    """What was exchanged, synchronised, audited, stored and claimed, as figures."""
    kinds = [
        ("versions committed on all nodes", catalogue.VERSION_COMMITTED),
        ("parts sent to other nodes", catalogue.EXCHANGE_SENT),
        ("checkpoints", catalogue.CHECKPOINT_COMPLETED),
        ("averages of replicas", catalogue.REPLICAS_AVERAGED),
        ("synchronisations", catalogue.REPLICAS_SYNCHRONISED),
        ("audits that failed", catalogue.AUDIT_FAILED),
    ]
    yield "<h2>Exchange, storage, replicas, memory</h2>"
    yield '<p class="soft">Of reports that are held one by one; older ones of every iteration are not.</p><table>'
    yield '<tr><th>what</th><th class="n">reports</th><th class="n">longest, s</th><th class="n">MiB</th></tr>'
    for words, kind in kinds:
        own = [event for event in events if event.type is kind]
        field = "waited_seconds" if "waited_seconds" in kind.fields else "seconds"
        lasted = [seconds for event in own if (seconds := event.fields.get(field)) is not None]
        sizes = [event.fields["bytes"] for event in own if "bytes" in kind.fields and "bytes" in event.fields]
        longest = f"{max(lasted):.3f}" if lasted else "-"
        size = f"{sum(sizes) / 2**20:,.1f}" if sizes else "-"
        yield _row(words, str(len(own)), longest, size)
    attached = (event for event in events if event.type is catalogue.RANK_ATTACHED)
    claimed = {each.rank: each.fields["budget_bytes"] for each in attached if "budget_bytes" in each.fields}
    size = f"{sum(claimed.values()) / 2**20:,.1f}" if claimed else "unknown"
    yield _row("memory of snapshots, by ranks that claimed it", str(len(claimed)), "-", size)
    yield "</table>"


def _row(words: str, *figures: str) -> str:
    return f"<tr><td>{words}</td>" + "".join(f'<td class="n">{figure}</td>' for figure in figures) + "</tr>"


def _failures(events: Sequence[Event]) -> Iterator[str]:
    """Warnings and alarms, the newest."""
    shown = [event for event in events if event.type is not None and event.type.severity >= Severity.WARNING]
    yield "<h2>Warnings and alarms</h2>"
    if not shown:
        yield "<p>None.</p>"
        return
    if len(shown) > _SHOWN:
        yield f"<p>The newest {_SHOWN} of {len(shown)}.</p>"
    yield "<table>"
    for event in shown[-_SHOWN:]:
        kind = event.type
        where = event.node if event.rank is None else f"{event.node} rank {event.rank}"
        said = event.fields.get("reason") or event.fields.get("message") or (kind.what if kind else "")
        head = f'<span class="soft">{_when(event.time)} UTC, {_text(where)}</span><br><b>{_text(event.name)}</b>'
        yield f"<tr><td>{head}: {_text(said)}<br>{_text(kind.action if kind else '')}</td></tr>"
    yield "</table>"
