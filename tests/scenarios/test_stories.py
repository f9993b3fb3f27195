"""Every *.story file here is told, on emulated nodes: own agent, SMP, workers and network namespace each.

What a story can say stands in `harness.story_parser`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.emulated_nodes import EmulatedHost, network
from harness.multinode import ExampleRun, Spec
from harness.story import JobShape, Story
from harness.story_parser import read
from harness.story_runner import HOSTS, StoryRunner, golden_run

STORIES = [read(path) for path in sorted(Path(__file__).parent.glob("*.story"))]


def told() -> Iterator[object]:
    """Each story by each of its frameworks that there is a rig for, with a port of its own."""
    for number, story in enumerate(STORIES):
        marks = [pytest.mark.all_configurations] if story.all_configurations else []
        for framework in story.job.frameworks:
            if framework == "deepspeed":
                marks = [*marks, pytest.mark.skipif(not find_spec("deepspeed"), reason="needs the extra [deepspeed]")]
            yield pytest.param(story, framework, 29400 + number, id=f"{story.name}-{framework}", marks=marks)


@pytest.fixture(scope="module")
def places() -> Iterator[list[EmulatedHost]]:
    with network(HOSTS) as found:
        yield found


@pytest.fixture(scope="module")
def golden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, JobShape], ExampleRun]:
    """The unfailed run of a job, made once for all stories about it, on however many nodes."""
    made: dict[tuple[str, JobShape], ExampleRun] = {}

    def run(framework: str, shape: JobShape) -> ExampleRun:
        key = (framework, replace(shape, nodes=1, frameworks=()))
        if key not in made:
            server = request.getfixturevalue(f"{framework}_server")
            made[key] = golden_run(server, framework, shape, tmp_path_factory.mktemp("golden"))
        return made[key]

    return run


@pytest.mark.parametrize(("story", "framework", "port"), list(told()))
def test_the_story_is_true(
    request: pytest.FixtureRequest,
    golden: Callable[[str, JobShape], ExampleRun],
    jobs: Spec,
    tmp_path: Path,
    places: list[EmulatedHost],
    story: Story,
    framework: str,
    port: int,
) -> None:
    server = request.getfixturevalue(f"{framework}_server")
    runner = StoryRunner(server, jobs, story, framework, tmp_path, places, port, lambda: golden(framework, story.job))
    runner.run()
