"""A checkpoint of a Megatron job, exported, loads through megatron.core alone, bit for bit, at any parallel size.

The witness is the state in which the writing run ended: digests of every tensor and of the small state, by rank.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from ft_plugins.model.topology import Topology
from ft_plugins.snapshot.checkpoint import checkpoint, persist
from ft_plugins.snapshot.checkpoint.checkpoint_reader import CheckpointReader
from harness.forkserver import JobSpec
from harness.golden import explain, tree_differences
from harness.job_control import run_to_end
from harness.megatron_runs import ITERATIONS, RANKS, MegatronConfiguration, MegatronRun

BOUND = 240
LOADER = f"{Path(__file__).with_name('loads_export.py')}:main"
TOPOLOGY, HALF = Topology(tp=2, pp=2, dp=2), Topology(tp=2, pp=2, dp=1)

CONFIGURATIONS = [
    MegatronConfiguration(bf16=True, distributed_optimizer=True, interleaved=True, overlap_param_gather=True),
    MegatronConfiguration(bf16=True, distributed_optimizer=False, interleaved=False),
    MegatronConfiguration(bf16=False, distributed_optimizer=True, interleaved=False),
    MegatronConfiguration(bf16=False, distributed_optimizer=False, interleaved=True),
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_an_exported_checkpoint_loads_into_megatron_bit_for_bit_also_at_other_sizes(
    megatron_server, jobs, tmp_path, configuration
):
    run, folder = written(jobs, tmp_path, configuration)
    target = tmp_path / "exported"
    said = export(folder, target)
    assert f"iteration {ITERATIONS}" in said

    same = loaded(megatron_server, tmp_path / "same", configuration, target)
    ranks = range(RANKS)
    found = [line for r in ranks for line in tree_differences(f"rank {r}", state(run.digests, r), state(same, r))]
    assert not found, explain(found)

    half = loaded(megatron_server, tmp_path / "half", configuration, target, ranks=RANKS // 2)
    assert_same_model(run, half)
    assert_same_optimizer_state(folder, half)


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(jobs, tmp_path):
    _, folder = written(jobs, tmp_path, CONFIGURATIONS[1])
    targets = tmp_path / "targets"
    (targets / "full").mkdir(parents=True)
    (targets / "full" / "theirs").write_text("kept")

    assert "the folder is not empty" in refused(folder, targets / "full")
    assert (targets / "full" / "theirs").read_text() == "kept"
    assert "not a complete checkpoint" in refused(folder.parent, targets / "new")
    for name, what, words in (
        ("flipped", checkpoint.data_file(3), "does not match the digest taken when it was captured"),
        ("absent", checkpoint.data_file(5), "cannot be read"),
    ):
        damaged = shutil.copytree(folder, tmp_path / name)
        path = damaged / what
        if name == "flipped":  # in the last bucket: most of the export is written by then
            content = bytearray(path.read_bytes())
            _, _, small = persist.read_head(path, checkpoint.read_record(damaged, 3))
            content[len(content) - len(small) - 100] ^= 1
            path.write_bytes(content)
        else:
            path.unlink()
        line = refused(damaged, targets / "new")
        assert words in line and what in line, line


def test_a_job_of_torch_alone_has_no_format_to_be_exported_to(torch_server, jobs, tmp_path):
    flags = ("--reft", "--reft-checkpoint-dir", str(tmp_path / "ck"), "--reft-checkpoint-interval", "4")
    argv = ("--iterations", "4", "--mib", "1", "--journal", str(tmp_path / "journal"))
    run_to_end(torch_server, jobs(entry="harness.fills:main", argv=argv, flags=flags, nproc=2))
    (folder,) = (tmp_path / "ck").glob("*/v1-4")
    line = refused(folder, tmp_path / "new")
    assert "not a checkpoint of a Megatron or DeepSpeed job" in line and str(folder) in line


def written(jobs, tmp_path, configuration):
    """A run that ended in order, and the checkpoint of its last iteration."""
    flags = ("--reft-checkpoint-dir", str(tmp_path / "ck"), "--reft-checkpoint-interval", str(ITERATIONS))
    run = MegatronRun("written", tmp_path / "run", configuration, protected=True, flags=flags)
    jobs.finish(run)
    (folder,) = (tmp_path / "ck").glob(f"*/v1-{ITERATIONS}")
    return run, folder


def command(folder, target):
    """`ft-plugins export` as a user gives it, without a device and without the job."""
    words = [Path(sys.executable).with_name("ft-plugins"), "export", folder, "--to", target]
    return subprocess.run(words, capture_output=True, text=True, timeout=BOUND)


def export(folder, target):
    done = command(folder, target)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def refused(folder, target):
    """The one line with which an export was refused; nothing is left where it was to be."""
    before = sorted(path.name for path in target.parent.iterdir())
    done = command(folder, target)
    assert (done.returncode, done.stdout) == (1, ""), done.stdout
    assert sorted(path.name for path in target.parent.iterdir()) == before
    (line,) = done.stderr.splitlines()
    return line


def loaded(server, folder, configuration, target, *more, ranks=RANKS):
    """The prefix of the digests of a job of `ranks` that has loaded `target`."""
    folder.mkdir()
    checkpoint = target / f"iter_{int((target / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    words = [str(checkpoint), str(folder / "state-"), *configuration.argv(), *more]
    spec = JobSpec(LOADER, tuple(words), f"l{os.getpid()}", str(folder), ranks, environment={"OMP_NUM_THREADS": "1"})
    run_to_end(server, spec)
    return folder / "state-"


def state(prefix, rank):
    """All but the data position, which Megatron's checkpoints do not have (it follows from the counters), and the
    number of updates, which Megatron's own load leaves in the distributed optimizer's groups, where Adam ignores it.
    """
    found = json.loads(Path(f"{prefix}{rank:05d}.json").read_text())
    del found["small"]["position"]
    for group in (each for groups in found["small"]["groups"] for each in groups):
        group.pop("step", None)
    return found


def assert_same_model(run, half):
    """Half as many replicas hold the same parameters."""

    def address(rank):
        at = HALF.coords(rank)
        return at.tp, at.pp, at.dp

    for rank in range(RANKS):
        at = TOPOLOGY.coords(rank)
        peer = next(other for other in range(HALF.world_size) if address(other) == (at.tp, at.pp, 0))
        assert state(run.digests, rank)["parameters"] == state(half, peer)["parameters"]


def assert_same_optimizer_state(folder, half):
    """Masters and moments, of which one rank holds now what two have written."""
    shares = CheckpointReader(folder)
    for peer in range(HALF.world_size):
        at = HALF.coords(peer)
        items = {name: digest for name, digest in state(half, peer)["items"].items() if ":" in name}
        assert any(name.endswith(":exp_avg_sq") for name in items)
        for name, digest in items.items():
            raw, dtype = shares.whole(name, TOPOLOGY.sharding_groups()[at.pp, at.tp])
            assert (digest["xxh3"], digest["dtype"]) == (xxhash.xxh3_64_hexdigest(raw.data), dtype), name
