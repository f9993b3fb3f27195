"""The Megatron host with one rank: each story of four files is a test."""

from pathlib import Path

import pytest

from tests.unit.adapters import gang_stories


@pytest.fixture(scope="module")
def outcomes(request):
    """The traceback of each story that was selected, None if it held."""
    return gang_stories.selected(request.session.items, Path(__file__), 500)


@gang_stories.stories("megatron_stories", "naming_stories", "megatron_paft_stories", "megatron_layer_wise_stories")
def test_the_megatron_host(name, outcomes):
    assert outcomes[name] is None, outcomes[name]
