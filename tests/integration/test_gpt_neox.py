"""An unmodified gpt-neox checkout under ft-run: what a user of its `train.py` gets, on the CPU."""

from harness.deepspeed_forks import ForkCase

from .fork_stories import (  # noqa: F401
    NODES,
    checkout,
    corpus,
    fork,
    pytest_generate_tests,
    test_a_lost_node_is_replaced_and_the_run_ends_in_the_state_of_an_unfailed_one,
    test_a_rehearsal_finds_it_exact,
    test_killed_in_forward_or_update_it_ends_in_the_state_of_an_unfailed_run,
)

FORK, VARIABLE = "gpt-neox", "GPT_NEOX_PATH"
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
