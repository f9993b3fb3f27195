"""An unmodified Megatron-DeepSpeed checkout under ft-run: what a user of its `pretrain_gpt.py` gets, on the CPU."""

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

FORK, VARIABLE = "Megatron-DeepSpeed", "MEGATRON_DEEPSPEED_PATH"
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
