"""How often Python collects garbage while a rank imports."""

import gc

import pytest

from ft_plugins.launcher.worker import collect_seldom


@pytest.fixture(autouse=True)
def usual():
    found = gc.get_threshold()
    yield found
    gc.set_threshold(*found)
    gc.enable()


def test_it_is_seldom_but_never_off_and_then_as_before(usual):
    undo = collect_seldom()
    assert gc.isenabled() and gc.get_threshold()[0] > usual[0]
    undo()
    assert gc.get_threshold() == usual


def test_what_the_script_has_chosen_stays():
    undo = collect_seldom()
    gc.set_threshold(5000, 7, 9)
    undo()
    assert gc.get_threshold() == (5000, 7, 9)
    gc.disable()
    collect_seldom()()
    assert not gc.isenabled() and gc.get_threshold() == (5000, 7, 9)


@pytest.mark.parametrize("threshold", [0, 1_000_000])
def test_an_interpreter_that_collects_less_often_already_is_left_alone(threshold):
    gc.set_threshold(threshold, 7, 9)
    undo = collect_seldom()
    assert gc.get_threshold() == (threshold, 7, 9)
    undo()
    assert gc.get_threshold() == (threshold, 7, 9)
