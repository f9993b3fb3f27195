"""The example's job with experts over two ranks, in Megatron's combined 1F1B: layers of one microbatch go forward while
those of another go backward, called one by one.

What megatron.core 0.16 lacks without Transformer Engine, or takes for granted of a GPU, is filled in: a name that the
router asks for, and sizes of a gathered exchange, which gloo wants as numbers.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch" / "examples"))

import gpt_job  # noqa: E402
import megatron_gpt  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model  # noqa: E402

EXPERTS, OVER = 4, 2


class CombinedJob(gpt_job.Job):
    """As its base, but a forward step returns the plan of its layers when the schedule asks for it."""

    def _forward_step(self, samplers, chunk, return_schedule_plan=False):
        if not return_schedule_plan:
            return super()._forward_step(samplers, chunk)
        planned = get_attr_wrapped_model(chunk, "build_schedule_plan")
        return super()._forward_step(samplers, planned)


def fill_in(dist):
    """See above."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    exchange = dist.all_to_all_single

    def all_to_all_single(output, sent, **named):
        numbers = {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in named.items()}
        return exchange(output, sent, **numbers)

    dist.all_to_all_single = all_to_all_single


if __name__ == "__main__":
    fill_in(torch.distributed)
    gpt_job.TransformerConfig = partial(
        gpt_job.TransformerConfig, num_moe_experts=EXPERTS, expert_model_parallel_size=OVER, moe_router_topk=2,
        moe_token_dispatcher_type="alltoall", overlap_moe_expert_parallel_comm=True, add_bias_linear=False,
    )  # fmt: skip
    gpt_job.get_gpt_layer_local_spec = partial(gpt_job.get_gpt_layer_local_spec, num_experts=EXPERTS)
    gpt_job.Topology = partial(gpt_job.Topology, ep=OVER)
    states = gpt_job.parallel_state
    states.initialize_model_parallel = partial(states.initialize_model_parallel, expert_model_parallel_size=OVER)
    megatron_gpt.Job = CombinedJob
    megatron_gpt.main(sys.argv[1:])
