"""Gradients that stay inside a replica of a Megatron job, modules, instances: each story of three files is a test."""

from pathlib import Path

import pytest

from tests.unit.adapters import gang_stories

# by default trajectories of whole jobs prove it: test_megatron_local_sgd
pytestmark = pytest.mark.all_configurations


@pytest.fixture(scope="module")
def outcomes(request):
    """The traceback of each story that was selected, None if it held."""
    return gang_stories.selected(request.session.items, Path(__file__))


@gang_stories.stories("megatron_reduction_stories", "megatron_module_stories", "megatron_instance_stories")
def test_the_reduction_of_a_megatron_job(name, outcomes):
    assert outcomes[name] is None, outcomes[name]
