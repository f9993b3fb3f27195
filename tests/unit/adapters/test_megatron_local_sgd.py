"""Local SGD on whole Megatron jobs at TP2 x PP2 x DP2: each story of `megatron_local_sgd_stories` is a test."""

from pathlib import Path

import pytest

from tests.unit.adapters import gang_stories


@pytest.fixture(scope="module")
def outcomes(request):
    """The traceback of each story that was selected, None if it held."""
    return gang_stories.selected(request.session.items, Path(__file__), 500)


@gang_stories.stories("megatron_local_sgd_stories")
def test_local_sgd_on_a_megatron_job(name, outcomes):
    assert outcomes[name] is None, outcomes[name]
