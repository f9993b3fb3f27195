"""Gradients that stay inside a replica of a Megatron job, modules, instances: each story of three files is a test."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.unit.adapters import gang_stories

FILES = ("megatron_reduction_stories", "megatron_module_stories", "megatron_instance_stories")

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]"),
    pytest.mark.all_configurations,  # by default trajectories of whole jobs prove it: test_megatron_local_sgd
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """The traceback of each story that was selected, None if it held."""
    return gang_stories.selected(request.session.items, Path(__file__))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", gang_stories.stories(*FILES))
def test_the_reduction_of_a_megatron_job(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
