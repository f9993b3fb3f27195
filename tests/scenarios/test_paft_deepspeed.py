"""Silent corruption in DeepSpeed jobs: found within one audit, named, repaired, and exact; averaging that is killed.

Golden runs are not protected at all, or, where replicas are averaged, are not killed. Comparisons are bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ft_plugins.rig.deepspeed_runs import Configuration, DeepSpeedRun
from ft_plugins.rig.forkserver import ForkServer, JobSpec, RunningJob
from ft_plugins.rig.golden import assert_identical, differing, state_differences

Spec = Callable[..., JobSpec]
BOUND = 400  # seconds for one run; ten times what it takes on an idle machine

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra [deepspeed]")

AUDIT = {"mode": "audit", "audit_interval": 1}
PIPELINE = Configuration(4, 0, bf16=False, pp=1)
PAIR = Configuration(2, 0, bf16=False, pp=1)
GATHERED = Configuration(2, 1, pp=1)


def started(
    server: ForkServer, jobs: Spec, folder: Path, configuration: Configuration, block: dict[str, Any]
) -> tuple[DeepSpeedRun, RunningJob]:
    folder.mkdir(exist_ok=True)
    run = DeepSpeedRun("protected", folder, configuration, block)
    fields = {key: value for key, value in vars(run.spec()).items() if key not in ("name", "folder")}
    job = server.start(jobs(**fields))
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", f"{outcome}\n{job.tail()}"
    return run, job


def finished(server: ForkServer, folder: Path, configuration: Configuration) -> DeepSpeedRun:
    folder.mkdir()
    run = DeepSpeedRun("golden", folder, configuration)
    job = server.start(run.spec())
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", f"{outcome}\n{job.tail()}"
    return run


def one(job: RunningJob, name: str) -> dict[str, Any]:
    """The fields of the only event of that name."""
    (event,) = job.events(name)
    return {"iteration": event.fields.get("iteration"), **event.fields}


@pytest.mark.parametrize(
    ("configuration", "block"),
    [
        pytest.param(PIPELINE, {}, id="before the update, whose gradients are computed again"),
        pytest.param(Configuration(4, 0, bf16=False), {"audit_at": "forward"}, id="before the forward of a script"),
    ],
)
def test_a_flipped_bit_in_one_of_four_is_named_and_repaired_and_the_run_is_the_clean_one(
    deepspeed_server: ForkServer, jobs: Spec, tmp_path: Path, configuration: Configuration, block: dict[str, Any]
) -> None:
    golden = finished(deepspeed_server, tmp_path / "golden", configuration)
    armed = "update.parameters@iteration=3,rank=2:flip=30~3"
    run, job = started(
        *(deepspeed_server, jobs, tmp_path / "job", configuration), {"paft": {**AUDIT, **block}, "faults": armed}
    )
    struck, differs = one(job, "fault.struck"), one(job, "sync.differs")
    assert struck["iteration"] == differs["iteration"] == 3
    assert differs["ranks"] == [2] and differs["majority"]
    layer = next((int(part) for part in struck["item"].split(":")[0].split(".") if part.isdecimal()), None)
    assert differs["layers"] == ([] if layer is None else [layer])
    assert "rank 2 of 4 wrong" in differs["reason"]
    assert_identical(run, golden, configuration.ranks)


def test_a_gathered_copy_that_is_wrong_is_gathered_anew_and_the_run_is_the_clean_one(
    deepspeed_server: ForkServer, jobs: Spec, tmp_path: Path
) -> None:
    """ZeRO-1 in bf16: what the optimizers hold is held once, and right; of two copies nobody has to know the wrong."""
    golden = finished(deepspeed_server, tmp_path / "golden", GATHERED)
    armed = "update.copies@iteration=3,rank=1:flip=13~5"
    run, job = started(deepspeed_server, jobs, tmp_path / "job", GATHERED, {"paft": AUDIT, "faults": armed})
    differs = one(job, "sync.differs")
    assert differs["iteration"] == 3 and differs["ranks"] == [0, 1] and not differs["majority"]
    assert ", copy (" in differs["reason"]
    assert_identical(run, golden, GATHERED.ranks)


def test_of_two_that_differ_one_is_wrong_and_both_agree_again(
    deepspeed_server: ForkServer, jobs: Spec, tmp_path: Path
) -> None:
    golden = finished(deepspeed_server, tmp_path / "golden", PAIR)
    armed = "update.parameters@iteration=3,rank=1:flip=22~3"
    run, job = started(deepspeed_server, jobs, tmp_path / "job", PAIR, {"paft": AUDIT, "faults": armed})
    differs = one(job, "sync.differs")
    assert differs["iteration"] == 3 and differs["ranks"] == [0, 1] and not differs["majority"]
    assert "one of these two" in differs["reason"]
    first, second = (json.loads(Path(f"{run.digests}{rank:05d}.json").read_text()) for rank in range(2))
    for part in ("items", "parameters"):
        assert first[part] and not list(differing("", first[part], second[part]))
    assert state_differences(run.digests, golden.digests, 2), "averaged, which is not the clean run"


def test_killed_while_replicas_are_averaged_it_ends_as_the_run_that_was_not(
    deepspeed_server: ForkServer, jobs: Spec, tmp_path: Path
) -> None:
    """Noise on every gradient: replicas drift apart, and each is resumed with its own state; turns at 2 and 4."""
    noise, paft = "update.gradients:gauss=0.01", {"h": 2, "h_min": 2, "h_max": 2}
    golden, unfailed = started(
        deepspeed_server, jobs, tmp_path / "golden", PAIR, {"paft": paft, "faults": noise}
    )
    turns = [turn(event.fields) for event in unfailed.events("sync.averaged") if event.rank == 0]
    assert [found[0] for found in turns] == [2, 4] and all(found[1] > 0 for found in turns)
    kills = "iteration.forward@iteration=3,rank=1,restart=0:kill;update.middle@iteration=5,rank=0,restart=1:kill"
    block = {"paft": paft, "reft": {}, "faults": f"{noise};{kills}"}
    run, job = started(deepspeed_server, jobs, tmp_path / "job", PAIR, block)
    restored = [event.fields["iteration"] for event in job.events("restore.done") if event.rank == 0]
    assert len(restored) == 2 and restored[0] in (1, 2) and restored[1] == 4
    again = [turn(event.fields) for event in job.events("sync.averaged") if event.rank == 0]
    assert set(map(tuple, again)) == set(map(tuple, turns)), "those that were done again found the same"
    assert again.count(turns[1]) == 2, "in flight at version 4, it was started again"
    assert_identical(run, golden, PAIR.ranks)


def turn(fields: Any) -> list[Any]:
    return [fields[key] for key in ("iteration", "divergence", "sigma", "signal")]


@pytest.mark.parametrize(
    ("configuration", "block", "message"),
    [
        (GATHERED, {"h": 3}, "it cannot drift, and an error in it reaches all of them alike"),
        (Configuration(2, 3), AUDIT, "ZeRO-3 gathers parameters for the moment of their use"),
        (Configuration(2, 0, bf16=False, pp=2), AUDIT, "--paft: has no effect with one data-parallel replica"),
    ],
    ids=["averaged under zero1", "zero3", "one replica"],
)
def test_what_would_mean_nothing_is_refused_by_name(
    deepspeed_server: ForkServer, jobs: Spec, tmp_path: Path, configuration: Configuration,
    block: dict[str, Any], message: str,
) -> None:  # fmt: skip
    run = DeepSpeedRun("refused", tmp_path, configuration, {"paft": block})
    fields = {key: value for key, value in vars(run.spec()).items() if key not in ("name", "folder")}
    job = deepspeed_server.start(jobs(**fields))
    outcome = job.wait(BOUND)
    assert outcome["status"] != "succeeded"
    assert message in " ".join(job.tail().split())
