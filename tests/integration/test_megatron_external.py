"""A Megatron-LM script with data loaders of its own, killed: what the loaders keep themselves is restored.

Runs where MEGATRON_LM_PATH names a checkout of core_v0.16.1. The witness is Megatron's own checkpoint at the end.
"""

from pathlib import Path

import pytest

from ft_plugins.errors import EXIT_REFUSED
from harness.megatron_checkpoints import differences, read
from harness.megatron_lm import ft_run

from .test_megatron_lm import ITERATIONS, JOB

pytestmark = [pytest.mark.timeout(900), pytest.mark.all_configurations]

SCRIPT = Path(__file__).with_name("megatron_external.py")
EXTERNAL = ("--dataloader-type", "external", "--reft", "--ftp-orphan-seconds", 30)
KILL = "update.middle@iteration=5,rank=3,restart=0:kill"


def test_a_killed_job_whose_loaders_read_ahead_ends_as_the_unfailed_one(checkout, tmp_path):
    """Only the first rank of a tensor-parallel group has loaders, on the first and on the last stage. Evaluations after
    3 and 6. Megatron's own save after 4 lacks the position, so that a version in memory is preferred."""
    states = {}
    for name, faults in {"unfailed": (), "killed": ("--ftp-faults", KILL)}.items():
        saved = tmp_path / name
        saved.mkdir()
        options = [*JOB, "--mock-data", "--save", saved, "--load", saved, *EXTERNAL, *faults]
        run = ft_run([SCRIPT, checkout, "stateful", *options], saved, job=f"external-{name}", ranks=4)
        run.require_success()
        states[name] = read(saved / f"iter_{ITERATIONS:07d}").state
        restored = {(event.fields["tier"], event.fields["iteration"]) for event in run.events("state.restored")}
        assert restored <= {("process", 4), ("process", 3)} and bool(restored) == (name == "killed"), restored
    assert differences(states["unfailed"], states["killed"]) == []


def test_a_loader_without_state_ends_the_job_by_name_before_its_first_iteration(checkout, tmp_path):
    """The second rank has no loaders, and nothing against them."""
    options = [*JOB, "--pipeline-model-parallel-size", "1", "--mock-data"]
    run = ft_run([SCRIPT, checkout, "stateless", *options, *EXTERNAL], tmp_path, job="external-stateless", ranks=2)
    assert run.status == EXIT_REFUSED, run.output[-4000:]
    line = (
        "rank 0: cannot protect this job: a data loader of the script's own without state_dict and load_state_dict "
        "(training: Samples, evaluation: Samples): its data position is unknown. Give it both, of plain values"
    )
    assert line in run.output, run.output[-4000:]
    assert "iteration        1/" not in run.output
