"""The catalogue is the only list of events: what is emitted, what is declared and what is documented are the same."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import ft_plugins
from ft_plugins.events import EventType, Severity, catalogue
from ft_plugins.events.__main__ import page
from ft_plugins.events.declaration import KINDS, NOTHING

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ft_plugins.__file__).parent
OWN = PACKAGE / "events"
DECLARED = {name: each for name, each in vars(catalogue).items() if isinstance(each, EventType)}
IRREGULAR = {"hung", "kept", "lost", "proven", "rebuilt", "sent", "unproven", "waiting"}  # that do not end with -ed


@cache
def _modules():
    """Those that have to do with events."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if OWN not in path.parents and "patches" not in path.parts]
    texts = {path: path.read_text() for path in paths}
    return tuple((path, ast.parse(text)) for path, text in texts.items() if ".emit(" in text or "catalogue" in text)


def _declarations(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "catalogue":
            yield node.attr, node


def _names_only(tree):
    """Mentions of a declaration that read events: `catalogue.X.name`, or a comparison with `event.type`."""
    readers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("name", "action", "what"):
            readers.add(node.value)
        if isinstance(node, ast.Compare):
            readers.update(node.comparators)
    return readers


def test_every_event_that_is_emitted_is_of_the_catalogue_with_declared_fields():
    wrong = []
    for path, tree in _modules():
        for call in ast.walk(tree):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "emit"):
                continue
            first, where = call.args[0], f"{path.relative_to(ROOT)}:{call.lineno}"
            named = [name for name, _ in _declarations(first)]
            if isinstance(first, ast.Constant) or any(name not in {*DECLARED, "EVENTS"} for name in named):
                wrong.append(f"{where}: {ast.unparse(first)} is not declared")
            for name in filter(DECLARED.__contains__, named):
                given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
                wrong += [f"{where}: {name} declares no {field}" for field in given - DECLARED[name].fields.keys()]
    assert not wrong


def test_every_declared_event_is_emitted_somewhere():
    emitted = {"ROUTINE_SUMMED"}  # by the file sink, of events that were emitted
    for _, tree in _modules():
        readers = _names_only(tree)
        emitted |= {name for name, node in _declarations(tree) if node not in readers}
    assert emitted - {"EVENTS"} == set(DECLARED)


@pytest.mark.parametrize("constant", DECLARED)
def test_a_declaration_is_complete_and_named_subject_and_verb(constant):
    each = DECLARED[constant]
    assert re.fullmatch(r"[a-z]+\.[a-z]+", each.name) and constant == each.name.upper().replace(".", "_")
    verb = each.name.partition(".")[2]
    assert verb.endswith("ed") or verb in IRREGULAR
    for text in (each.what, each.action):
        assert text[0].isupper() and text.endswith(".")
    assert each.severity in (Severity.NOTICE, Severity.ROUTINE) or each.action != NOTHING, "what does an operator do?"
    for name in each.ends:
        assert catalogue.EVENTS[name].severity is Severity.ALARM
    for name, field in each.fields.items():
        assert field.kind in KINDS and field.meaning and name not in ("name", "time", "node")
    assert catalogue.EVENTS[each.name] is each


def test_what_the_snapshot_process_has_printed_is_an_alarm_or_the_end_of_one():
    said = [
        name
        for path, tree in _modules()
        if "smp" in path.parts
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, (ast.Attribute, ast.Name))
        if ast.unparse(call.func).endswith(("_alarms.say", "RepeatedFailure", "RaiseAlarm"))
        for argument in call.args
        for name, _ in _declarations(argument)
    ]
    assert len(said) >= 4 and all(DECLARED[name].printed for name in said)


def test_the_page_for_operators_is_what_the_catalogue_says():
    assert (ROOT / "docs" / "events.md").read_text() == page(), "python -m ft_plugins.events > docs/events.md"


def test_no_other_document_names_an_event_that_does_not_exist():
    subjects = "|".join({name.partition(".")[0] for name in catalogue.EVENTS})
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        named = re.findall(rf"`((?:{subjects})\.[a-z]+)`", path.read_text())
        assert not [name for name in named if name not in catalogue.EVENTS], path.name
