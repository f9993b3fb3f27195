"""The runbook has every alarm and every public error, in the words of the catalogue."""

import inspect
from pathlib import Path

import pytest

from ft_plugins import errors
from ft_plugins.events import Severity, catalogue
from ft_plugins.events.runbook import DOES, ERRORS, page

ROOT = Path(__file__).parents[2]
ALARMS = [each for each in catalogue.EVENTS.values() if each.severity is Severity.ALARM]


def test_the_page_is_what_the_catalogue_says():
    command = "python -m ft_plugins.events.runbook > docs/runbook.md"
    assert (ROOT / "docs" / "runbook.md").read_text() == page(), command


def test_what_the_job_does_by_itself_is_said_of_every_alarm_and_of_nothing_else():
    assert set(DOES) == set(ALARMS)


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda each: each.name)
def test_a_row_has_the_catalogues_words(alarm):
    assert isinstance(alarm, type(ALARMS[0]))
    [row] = [line for line in page().splitlines() if line.startswith(f"| [`{alarm.name}`]")]
    assert row.split(" | ")[1:] == [alarm.what, DOES[alarm], f"{alarm.action} |"]


def test_every_public_error_has_a_row():
    public = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.FtError) and kind is not errors.FtError
    }
    assert set(ERRORS) == public
