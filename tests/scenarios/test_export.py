"""A checkpoint of a Megatron job, exported, loads through megatron.core alone, bit for bit, at any parallel size.

The witness is the state in which the writing run ended: digests of every tensor and of the small state, by rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from typer.testing import CliRunner

from ft_plugins import cli
from ft_plugins.model.topology import Topology
from ft_plugins.rig.forkserver import ForkServer, JobSpec
from ft_plugins.rig.golden import differing, explain
from ft_plugins.rig.gpt_runs import ITERATIONS, RANKS, Configuration, GptRun
from ft_plugins.snapshot.shares import Shares

Spec = Callable[..., JobSpec]
BOUND = 240
LOADER = f"{Path(__file__).with_name('loads_export.py')}:main"
TOPOLOGY = Topology(tp=2, pp=2, dp=2)

CONFIGURATIONS = [
    Configuration(bf16=True, distributed_optimizer=True, interleaved=True, overlap_param_gather=True),
    Configuration(bf16=True, distributed_optimizer=False, interleaved=False),
    Configuration(bf16=False, distributed_optimizer=True, interleaved=False),
    Configuration(bf16=False, distributed_optimizer=False, interleaved=True),
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_an_exported_checkpoint_loads_into_megatron_bit_for_bit_also_at_other_sizes(
    megatron_server: ForkServer, jobs: Spec, tmp_path: Path, configuration: Configuration
) -> None:
    run, folder = written(megatron_server, jobs, tmp_path, configuration)
    target = tmp_path / "exported"
    said = export(folder, target)
    assert f"iteration {ITERATIONS}" in said

    same = loaded(megatron_server, tmp_path / "same", configuration, target)
    found = [line for rank in range(RANKS) for line in differing(f"rank {rank}", state(run.digests, rank), state(same, rank))]
    assert not found, explain(found)

    alone = configuration if not configuration.interleaved else simpler(configuration)
    whole = loaded(megatron_server, tmp_path / "other", alone, target, "--tp", "2", "--pp", "2", ranks=4)
    assert_same_model(run, whole, configuration, alone)
    if configuration.distributed_optimizer:
        assert_same_shards(folder, whole, configuration, alone)


def simpler(configuration: Configuration) -> Configuration:
    return Configuration(configuration.bf16, configuration.distributed_optimizer, True)


def written(server: ForkServer, jobs: Spec, tmp_path: Path, configuration: Configuration) -> tuple[GptRun, Path]:
    """A run that ended in order, and the checkpoint of its last iteration."""
    (tmp_path / "run").mkdir()
    flags = ("--reft-checkpoint-dir", str(tmp_path / "ck"), "--reft-checkpoint-interval", str(ITERATIONS))
    run = GptRun("written", tmp_path / "run", configuration, protected=True, flags=flags)
    spec = run.spec()
    job = server.start(jobs(**{key: value for key, value in vars(spec).items() if key != "name"}))
    assert job.wait(BOUND)["status"] == "succeeded", job.tail()
    (folder,) = (tmp_path / "ck").glob(f"*/v1-{ITERATIONS}")
    return run, folder


def export(folder: Path, target: Path) -> str:
    outcome = CliRunner().invoke(cli.app, ["export", str(folder), "--to", str(target)], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def loaded(
    server: ForkServer, folder: Path, configuration: Configuration, target: Path, *more: str, ranks: int = RANKS
) -> Path:
    """The prefix of the digests of a job of `ranks` that has loaded `target`."""
    folder.mkdir()
    checkpoint = target / f"iter_{int((target / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    words = [str(checkpoint), str(folder / "state-"), *configuration.argv(), *more]
    spec = JobSpec(LOADER, tuple(words), f"l{os.getpid()}", str(folder), ranks, environment={"OMP_NUM_THREADS": "1"})
    job = server.start(spec)
    assert job.wait(BOUND)["status"] == "succeeded", job.tail(60)
    return folder / "state-"


def state(prefix: Path, rank: int) -> dict[str, Any]:
    """All but the data position, which no checkpoint of Megatron's has: it follows from the counters."""
    found: dict[str, Any] = json.loads(Path(f"{prefix}{rank:05d}.json").read_text())
    del found["small"]["position"]
    return found


def assert_same_model(run: GptRun, other: Path, before: Configuration, after: Configuration) -> None:
    """Half as many replicas hold the same parameters."""
    half = Topology(tp=2, pp=2, dp=1)
    for rank in range(RANKS):
        at = TOPOLOGY.coords(rank)
        (peer,) = (r for r in range(4) if (half.coords(r).tp, half.coords(r).pp) == (at.tp, at.pp))
        assert state(run.digests, rank)["parameters"] == state(other, peer)["parameters"]


def assert_same_shards(folder: Path, other: Path, before: Configuration, after: Configuration) -> None:
    """What was in two shards is in one: masters and moments."""
    shares, half = Shares(folder), Topology(tp=2, pp=2, dp=1)
    for peer in range(4):
        at = half.coords(peer)
        ranks = next(r for key, r in TOPOLOGY.sharding_groups().items() if key == (at.pp, at.tp))
        items = state(other, peer)["items"]
        assert any(name.endswith(":exp_avg_sq") for name in items)
        for name, digest in items.items():
            raw, dtype = shares.whole(name, ranks)
            assert (digest["xxh3"], digest["dtype"]) == (xxhash.xxh3_64_hexdigest(raw.data), dtype), name
