"""Megatron-LM's pretrain_gpt.py with parameters that FSDP divides, killed: it ends as the unfailed run, bit for bit.

Runs where MEGATRON_LM_PATH names a checkout. core_v0.16.1 cannot train with torch's FSDP2, nor, without Transformer
Engine, with Megatron FSDP and tensor parallelism, nor with experts, so that these cases need another version.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from harness.megatron_checkpoints import differences
from harness.megatron_lm import SETTINGS, ft_run

from .test_check_agrees import SMALL, both, require_agreement
from .test_megatron_lm import JOB
from .test_megatron_lm_nodes import LOST_FROM, Protection, lose_a_node

pytestmark = [pytest.mark.timeout(900), pytest.mark.all_configurations]

SCRIPT = Path(__file__).with_name("megatron_end.py")
STREAMS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}  # FSDP refuses 1
TORCH = (
    *("--use-torch-fsdp2", "--ckpt-format", "torch_dist", "--untie-embeddings-and-output-weights"),
    *("--pipeline-model-parallel-size", "1", "--global-batch-size", "4"),
)
MEGATRON = (
    *("--use-megatron-fsdp", "--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor"),
    *("--no-gradient-reduce-div-fusion", "--untie-embeddings-and-output-weights"),
    *("--pipeline-model-parallel-size", "1", "--global-batch-size", "4", "--data-parallel-sharding-strategy"),
)
ALONE = ("--tensor-model-parallel-size", "1")
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--sequence-parallel")


@dataclass(frozen=True)
class Case:
    """Arguments, the number of ranks, where rank 1 is killed, and the iteration."""

    options: tuple[str, ...]
    ranks: int
    point: str = "update.middle"
    iteration: int = 4


CASES = {
    "torch-fp32": Case((*TORCH, *ALONE), 2),
    "torch-bf16-tensor-parallel": Case((*TORCH, "--bf16"), 4, "iteration.forward", 5),
    "megatron-parameters-bf16-tensor-parallel": Case((*MEGATRON, "optim_grads_params", "--bf16"), 4),
    "megatron-parameters-fp32": Case((*MEGATRON, "optim_grads_params", *ALONE), 2, "iteration.forward", 5),
    "megatron-gradients-bf16": Case((*MEGATRON, "optim_grads", "--bf16", *ALONE), 2),
    "megatron-optimizer-bf16": Case((*MEGATRON, "optim", "--bf16", *ALONE), 2),
    "megatron-experts-bf16": Case((*MEGATRON, "optim_grads_params", "--bf16", *ALONE, *EXPERTS), 4),
}


def skip_unless_it_trains(checkout, options):
    """Skip a case of torch's FSDP2 if Megatron-LM calls its wrapper with an argument that it lacks, and one of Megatron
    FSDP if with tensor parallelism, or the router of its experts, it needs Transformer Engine."""
    distributed = checkout / "megatron" / "core" / "distributed"
    caller, wrapper, adapter = (
        (distributed / f"{name}.py").read_text()
        for name in ("finalize_model_grads", "torch_fully_sharded_data_parallel", "fsdp/mcore_fsdp_adapter")
    )
    if "--use-torch-fsdp2" in options:
        if "force_all_reduce=" in caller and "force_all_reduce" not in wrapper:
            pytest.skip("this version of Megatron-LM cannot train with torch's FSDP2")
    elif ALONE[0] not in options and "isinstance(direct_module, (TELinear,))" in adapter:
        pytest.skip("this version of Megatron FSDP needs Transformer Engine for tensor parallelism")
    if EXPERTS[0] in options and find_spec("transformer_engine") is None:
        router = (checkout / "megatron" / "core" / "transformer" / "moe" / "moe_utils.py").read_text()
        if "te_general_gemm is not None" in router and "te_general_gemm = None" not in router:
            pytest.skip("the router of this version of Megatron-LM cannot route without Transformer Engine")


def run(checkout, corpus, folder, case, *flags):
    folder.mkdir()
    script = [SCRIPT, checkout, folder, *JOB, *case.options, "--data-path", corpus]
    return ft_run(script, folder, *flags, job=folder.name, ranks=case.ranks, settings=STREAMS)


def ends(folder, ranks):
    return {f"rank {rank}": torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_job_ends_as_the_unfailed_one(checkout, corpus, tmp_path, name):
    case = CASES[name]
    skip_unless_it_trains(checkout, case.options)
    unfailed, killed = tmp_path / "unfailed", tmp_path / "killed"
    run(checkout, corpus, unfailed, case).require_success()
    kill = f"{case.point}@iteration={case.iteration},rank=1,restart=0:kill"

    ours = run(checkout, corpus, killed, case, "--reft", "--ftp-faults", kill, "--ftp-orphan-seconds", 30)

    ours.require_success()
    restored = ours.events("state.restored")
    assert sorted(event.rank for event in restored) == list(range(case.ranks)), restored
    versions = {(event.fields["tier"], event.fields["iteration"]) for event in restored}
    assert versions in ({("process", case.iteration - 1)}, {("process", case.iteration - 2)}), versions
    expected = ends(unfailed, case.ranks)
    assert any(group["parameters"] for one in expected["rank 0"]["updated"] for group in one)
    assert differences(expected, ends(killed, case.ranks)) == []


LOST = {
    "torch": (*TORCH, "--bf16", *ALONE),
    "megatron": (*MEGATRON, "optim_grads_params", "--bf16", *ALONE),
}


@pytest.mark.parametrize("name", LOST)
def test_the_shards_of_a_lost_node_are_rebuilt(checkout, corpus, tmp_path, monkeypatch, name):
    skip_unless_it_trains(checkout, LOST[name])
    for key, value in {**SETTINGS, **STREAMS}.items():
        monkeypatch.setenv(key, value)
    protection = Protection(f"fsdp-{name}", LOST[name], ("--reft", "--reft-redundancy", "raim5"), 30)
    case = Case((*LOST[name], "--train-iters", str(protection.iterations)), 4)
    unfailed, lost = tmp_path / "unfailed", tmp_path / "lost"
    run(checkout, corpus, unfailed, case).require_success()
    lost.mkdir()

    words = [SCRIPT, checkout, lost, *JOB, *case.options, "--data-path", corpus, *protection.ours]
    reported = lose_a_node(words, tmp_path / "job", protection, on_node=2)

    rebuilt = [event for event in reported if event.name == "slot.rebuilt"]
    assert sorted(event.fields["about"] for event in rebuilt) == [2, 3], "the shares of the lost node"
    restored = {event.fields["iteration"] for event in reported if event.name == "state.restored"}
    assert restored and min(restored) >= LOST_FROM, restored
    assert differences(ends(unfailed, case.ranks), ends(lost, case.ranks)) == []


REFUSED = {
    "nothing": ("optim_grads_params", "--reft"),
    "Megatron FSDP that divides nothing": ("no_shard", "--reft"),
    "parameters that FSDP divides": ("optim", "--paft"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_ends_as_check_says(checkout, own_environment, name):
    options = ("--bf16", *MEGATRON[:-1], *ALONE, "--data-parallel-sharding-strategy", *REFUSED[name])
    script = (str(checkout / "pretrain_gpt.py"), *SMALL, *options, "--global-batch-size", "2")
    environment = {"PYTHONPATH": str(checkout), **STREAMS}
    checked, status, output = both(("--nproc-per-node", "1", *script), own_environment, environment)
    assert checked["notes"] == [], checked
    require_agreement(checked, status, output)
    assert (name == "nothing") == (not checked["refusal"]) and (name == "nothing" or name in checked["refusal"])
