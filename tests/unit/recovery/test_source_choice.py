"""A version of this job, or a newer checkpoint of the framework's own that lacks some of the state."""

from dataclasses import replace

import pytest

from ft_plugins.recovery.recovery_plan import RecoveryPlan
from ft_plugins.recovery.source_choice import choose_source
from ft_plugins.recovery.storage import with_storage
from ft_plugins.snapshot.segment.slots import Version

MEMORY = RecoveryPlan(Version(2, 70), "process", 3, 79, 9, "newest that all ranks can have")
LACKING = replace(MEMORY, lacking="what callbacks keep")
EMPTY = replace(LACKING, version=None, tier="none", reason="no version is held by all ranks")


@pytest.mark.parametrize(
    ("plan", "loaded", "expected"),
    [
        (MEMORY, 80, None),  # whole: the larger iteration wins
        (LACKING, 75, 70),
        (LACKING, 80, 70),  # saved in an iteration that did not end
        (LACKING, 81, None),  # the job has gone on elsewhere
        (EMPTY, 75, None),
    ],
)
def test_a_checkpoint_that_lacks_state_is_not_preferred_where_the_job_comes_to_it_again(plan, loaded, expected):
    chosen = choose_source(plan, "auto", loaded)
    assert (None if chosen.version is None else chosen.version.iteration) == expected
    if expected:
        said = f"newer, but the framework's own, which lacks what callbacks keep: {loaded}"
        assert said in chosen.table()
    elif plan.lacking:
        assert "it lacks what callbacks keep, which begins again" in chosen.table()


def test_a_stored_version_is_preferred_to_it_in_the_same_way():
    stored = Version(1, 60)
    again, whole = (with_storage(replace(EMPTY, lacking=one), "auto", 75, stored, True) for one in ("callbacks", ""))
    assert (again.version, again.repeated) == (stored, 75)
    assert (whole.version, whole.loaded) == (None, 75)
    elsewhere = with_storage(EMPTY, "auto", 81, stored, True)
    assert (elsewhere.version, elsewhere.loaded) == (None, 81) and "begins again" in elsewhere.table()
