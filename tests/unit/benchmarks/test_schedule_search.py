"""The scheduling figures: the brute force with costs of sets against the plain one."""

import pytest

from ft_plugins.sync.layers.layers_schedule import period_ns
from workloads.layer_shapes import COLUMNS
from workloads.schedule_references import contiguous
from workloads.schedule_search import LAYERS, best_contiguous_ns, schedule_figures, shaped_profile


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_brute_force_is_that_of_all_schedules(column):
    profile = shaped_profile(column.shape, column.ratio, 12)
    every = min(period_ns(profile, other) for other in contiguous(12, 4))
    assert best_contiguous_ns(profile, 4) == every


def test_profiles_have_the_ratio_and_as_many_layers_as_asked_for():
    for layers in (LAYERS, 200):
        profile = shaped_profile("resnet18", 3.0, layers)
        assert len(profile) == layers
        assert sum(profile.communication_ns) == pytest.approx(3.0 * profile.compute_ns, rel=1e-6)


def test_no_kind_of_planning_beats_brute_force_over_contiguous_sets_but_one_whose_sets_are_not():
    found = schedule_figures(COLUMNS[:1])
    assert found["search_planned_worst_x"] <= 1.0 <= found["search_paper_search_x"] <= found["search_equal_worst_x"]
