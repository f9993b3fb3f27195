"""Events that do not fit the catalogue are left out and counted: no command that looks back ends with a traceback."""

import json

from typer.testing import CliRunner

from ft_plugins.cli import app
from ft_plugins.events import Damage, Event, catalogue, read

VALUES = {"bool": True, "int": 3, "float": 2.5, "str": "words", "list": [1], "dict": {"a": 1.0}}
ODD = (
    None, "7", -1, 10**30, 1e300, float("nan"), True, {}, {"a": {"b": "c"}}, [], [["x"]], [[1, 2]], [["x", None]], "",
)  # fmt: skip
EVENTS = list(catalogue.EVENTS.values())
COMMANDS = (["why"], ["why", "--json"], ["report"], ["report", "--json"], ["events", "--routine"], ["events", "--json"])


def value(field):
    if isinstance(field.of, tuple):
        return [[VALUES[kind] for kind in field.of]]
    return VALUES[field.kind]


def line(kind, time, fields):
    return json.dumps({"time": time, "name": kind.name, "node": "n", "rank": 0, "pid": 5, **fields})


def damaged(kind):
    """The fields of an event with each of them missing or odd in turn, and with one that is not declared."""
    good = {name: value(field) for name, field in kind.fields.items()}
    for name in good:
        yield {key: each for key, each in good.items() if key != name}
        yield from (good | {name: odd} for odd in ODD)
    for name in {"seconds", "bytes", "waited_seconds", "about", "iteration", "reason"} - kind.fields.keys():
        yield from (good | {name: odd} for odd in ODD)
    yield {}


def whole_story():
    """Every event as declared: each as an odd one's neighbour."""
    return [
        line(kind, 1000.0 + number, {name: value(field) for name, field in kind.fields.items()})
        for number, kind in enumerate(EVENTS)
    ]


def run_all(path, commands=COMMANDS):
    page, drawn = path.with_suffix(".html"), path.with_suffix(".trace")
    for command in (*commands, ["report", "--html", str(page)], ["trace", "--to", str(drawn)]):
        done = CliRunner().invoke(app, [*command, "--events", str(path)])
        assert done.exception is None and done.exit_code == 0, (command, done.exception)


def test_an_event_with_a_field_that_is_missing_or_odd_ends_no_command(tmp_path):
    path = tmp_path / "events.jsonl"
    odd = [line(kind, 1000.5 + number / 8, fields) for kind in EVENTS for number, fields in enumerate(damaged(kind))]
    path.write_text("\n".join([*whole_story(), *odd]) + "\n")
    run_all(path)


def test_what_is_left_out_is_counted_and_said(tmp_path):
    path = tmp_path / "events.jsonl"
    good = {"rank": 1, "local_rank": 1, "exitcode": 1, "signal": "", "message": "ValueError: x"}
    wrong = [good | {"exitcode": "1"}, good | {"message": ["x"]}]
    lines = [line(catalogue.WORKER_FAILED, 1000.0 + number, fields) for number, fields in enumerate([good, *wrong])]
    resumed = line(catalogue.RANKS_RESUMED, 1010, {"restart": 0, "token": 1, "iteration": 3})
    path.write_text("\n".join([*lines, resumed, '{"time": 10', ""]))
    damage = Damage()
    assert [event.rank for event in read(path, damage)] == [1] and damage.lines == 4
    for command in COMMANDS:
        done = CliRunner().invoke(app, [*command, "--events", str(path)])
        assert done.stderr == "4 damaged events left out\n" and "damaged" not in done.stdout
        assert done.exit_code == 0


def test_an_event_of_another_version_is_shown_as_it_is(tmp_path):
    path = tmp_path / "events.jsonl"
    newer = [
        Event("not.known", 1.0, "n", None, 1, {"seconds": "x"}),
        Event("smp.lost", 2.0, "n", None, 1, {"tint": []}),
    ]
    path.write_text("".join(event.line() + "\n" for event in newer))
    assert [*read(path, damage := Damage())] == newer and not damage.lines
    run_all(path)
