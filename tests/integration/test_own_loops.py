"""Loops that users write, killed in mid-run under ft-run: each ends as one without protection, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ft_plugins.events import read
from harness import orderly_end

SCRIPT = Path(__file__).with_name("own_loops.py")
FT_RUN, TORCHRUN = ("-m", "ft_plugins.launcher.command"), ("-m", "torch.distributed.run", "--standalone")
ORDERLY_END = str(Path(orderly_end.__file__))
BOUND = 280


def _run(folder, kind, *launcher, own=(), status=0):
    """The final state of each of two ranks; the output of a job that ends with another status."""
    folder.mkdir(mode=0o700)
    words = [*launcher, str(SCRIPT), kind, str(folder / "state-"), *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(folder)}
    out = folder / "out"  # no pipe: an SMP that stays would have it open
    with out.open("w") as printed:
        done = subprocess.run(
            [sys.executable, *words], cwd=SCRIPT.parent, env=environment, stdout=printed, stderr=subprocess.STDOUT,
            timeout=BOUND, check=False,
        )  # fmt: skip
    assert done.returncode == status, out.read_text()[-3000:]
    if status:
        return out.read_text()
    return [json.loads((folder / f"state-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "kind",
    [
        *("gan", "lora", "sized"),
        *(pytest.param(one, marks=pytest.mark.all_configurations) for one in ("accumulated", "scaled", "curriculum")),
    ],
)
def test_a_loop_that_is_killed_after_a_step_ends_bit_for_bit_as_an_unprotected_one(own_environment, kind):
    """The GAN after the discriminator's step and before the generator's; the others after their only or first one."""
    job, ranks = f"own-{kind}-{os.getpid()}", ("--nproc-per-node", "2")
    golden = _run(own_environment / f"{kind}-g", kind, *TORCHRUN, *ranks, ORDERLY_END, own=("unprotected",))
    fault = "--ftp-faults=update.end@iteration=7,rank=1,restart=0:kill"
    killed = _run(own_environment / f"{kind}-k", kind, *FT_RUN, *ranks, "--reft", "--ftp-job", job, fault)
    assert killed == golden
    [path] = (own_environment / f"{kind}-k").glob("ft_plugins/*/*/events.jsonl")
    restored = [event.fields["iteration"] for event in read(path) if event.name == "state.restored"]
    assert restored == [6, 6] and not [
        event for event in read(path) if event.name in ("protection.lost", "values.restarted")
    ]


def test_ranks_that_are_no_replicas_are_named_before_a_restore_could_mix_them(own_environment):
    words = ("--nproc-per-node", "2", "--reft", "--ftp-job", f"own-apart-{os.getpid()}")
    said = _run(own_environment / "apart", "apart", *FT_RUN, *words, status=78)
    assert "iteration 2: 'bias' of rank 1 differs from rank 0's (2 tensors do)" in said
