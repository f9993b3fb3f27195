"""An unmodified Megatron-DeepSpeed checkout under ft-run: what a user of its `pretrain_gpt.py` gets, on the CPU.

Runs where MEGATRON_DEEPSPEED_PATH names a checkout; tests/matrix.sh --clients runs it for each one in a folder. What is
compared is all that the fork saves at the end of each run: parameters, optimizer, scheduler, arguments with consumed
samples and tokens, random number generators.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.deepspeed_forks import ForkCase, applicable, checkout_of
from harness.megatron_lm import write_corpus

from .fork_stories import a_killed_run_ends_like_an_unfailed_one, a_lost_node_is_replaced

pytestmark = pytest.mark.timeout(1500)
FORK = "Megatron-DeepSpeed"
CURRICULUM = {
    "curriculum_learning": {
        **{"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32},
        **{"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 8}},
    }
}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2}}
RAMP_UP = ("--rampup-batch-size", "4", "2", "16")  # 4, 4, 6, 6, 8, 8, 8 samples
AUDIT = ("--reft", "--reft-interval", "1", "--paft", "--paft-mode", "audit", "--paft-audit-interval", "2")
CASES = (
    ForkCase("pipelines-own-load-beside", loads=True),  # its own save has 4, memory 5
    ForkCase(
        *("pipelines-zero-1-bf16-audited", 4, 1, 2, 1, ("--bf16",), {"bf16": {"enabled": True}}),
        kill="update.middle@iteration=6,rank=2,restart=0",
        protected=AUDIT,
    ),
    ForkCase(
        "zero-2-cyclic",
        2,
        1,
        1,
        2,
        ("--dataloader-type", "cyclic"),
        kill="iteration.forward@iteration=5,rank=1,restart=0",
    ),
    ForkCase("zero-3", 2, 1, 1, 3),
    ForkCase("pipelines", kill="update.middle@iteration=5,rank=3,restart=0"),
    ForkCase("zero-1", 2, 1, 1, 1),
    ForkCase("zero-1-fp16", 2, 1, 1, 1, ("--fp16",), settings=FP16),
    ForkCase("ramp-up", 2, 1, 1, 1, RAMP_UP, kill="iteration.forward@iteration=4,rank=1,restart=0", samples=44),
    ForkCase("pipelines-ramp-up", 4, 1, 2, 1, RAMP_UP, samples=44),
    ForkCase("curriculum-pipelines", settings=CURRICULUM, before=(0, 19)),
    ForkCase("curriculum", 2, 1, 1, 1, settings=CURRICULUM, before=(0, 19)),
)
NODES = (
    ForkCase(
        *("parity", 4, 2, 1, 1),
        iterations=14,
        protected=("--reft", "--reft-interval", "1", "--reft-redundancy", "raim5"),
    ),
    ForkCase("bubbles", 4, 1, 2, 1, iterations=150, protected=("--baft",)),
)


@pytest.fixture(scope="module")
def checkout() -> Path:
    return checkout_of("MEGATRON_DEEPSPEED_PATH")


@pytest.fixture(scope="module")
def corpus(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.mark.parametrize("case", applicable(CASES), ids=str)
def test_killed_in_forward_or_update_it_ends_in_the_state_of_an_unfailed_run(
    checkout: Path, corpus: Path, tmp_path: Path, case: ForkCase, record_property: Callable[[str, object], None]
) -> None:
    a_killed_run_ends_like_an_unfailed_one(FORK, checkout, corpus, case, tmp_path, record_property)


@pytest.mark.parametrize("case", NODES, ids=str)
def test_a_lost_node_is_replaced_and_the_run_ends_in_the_state_of_an_unfailed_one(
    checkout: Path, corpus: Path, tmp_path: Path, case: ForkCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_lost_node_is_replaced(FORK, checkout, corpus, case, tmp_path, monkeypatch)
