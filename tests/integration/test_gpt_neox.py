"""An unmodified gpt-neox checkout under ft-run: what a user of its `train.py` gets, on the CPU.

Runs where GPT_NEOX_PATH names a checkout; tests/matrix.sh --clients runs it for each one in a folder. Witness: what it
saves at the end of each run, in all its files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.deepspeed_forks import ForkCase, applicable, checkout_of
from harness.megatron_lm import write_corpus

from .fork_stories import a_killed_run_ends_like_an_unfailed_one, a_lost_node_is_replaced

pytestmark = pytest.mark.timeout(1500)
FORK = "gpt-neox"
IN_YML = {"ft_plugins": {"reft": {"interval": 1}, "paft": {"mode": "audit", "audit_interval": 2}}}
FP16 = {"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2}}
CASES = (
    ForkCase("pipelines"),
    ForkCase("pipelines-zero-1-load-audited", 4, 1, 2, 1, settings=IN_YML, loads=True, protected=("--reft",)),
    ForkCase("pipelines-zero-1", 4, 2, 2, 1, kill="update.middle@iteration=5,rank=2,restart=0"),
    ForkCase("zero-1-evaluated", 2, 1, 1, 1),
    ForkCase("zero-2", 2, 1, 1, 2),
    ForkCase("zero-1-fp16", 2, 1, 1, 1, settings=FP16),
    ForkCase(*("zero-2-own-load-beside", 2, 1, 1, 2), loads=True, kill="update.middle@iteration=6,rank=1,restart=0"),
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
    return checkout_of("GPT_NEOX_PATH")


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
