"""Run by test_schedules.py: what the schedules of megatron-core and DeepSpeed do on each rank.

Megatron-core: the functions of `pipeline_parallel.schedules` run unchanged, one rank at a time; passes and network are
stand-ins, each call of the communicator and each wait for a handle is written down. DeepSpeed: the instructions of its
`TrainSchedule`; its buffers stand where microbatches are named.

In: JSON lines on standard input, {framework, ranks, microbatches, chunks, group, overlap}. Out: a JSON line for each,
by rank the list of what is done, spelled as `test_schedules.words` spells a program.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules, utils

Case = dict[str, Any]


class Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Handle:
    def __init__(self, log: list[str], what: str) -> None:
        self._log, self._what = log, what

    def wait(self) -> None:
        self._log.append(f"wait {self._what}")


class Communicator:
    """Sends and receives nothing; a tensor is the text that names its maker."""

    def __init__(self, case: Case, rank: int, config: Any, log: list[str]) -> None:
        self.pp_group, self.config, self._log = Group(case["ranks"], rank), config, log
        self.virtual_pipeline_model_parallel_size = case["chunks"] if case["chunks"] > 1 else None

    def _talk(self, *parts: str | None, overlap: bool = False) -> dict[str, Handle]:
        found = [part for part in parts if part]
        if found:
            self._log.append(("begin " if overlap else "block ") + ", ".join(found))
        return {part.split()[0]: Handle(self._log, part) for part in found}

    def recv_forward(self, shape: Any, is_first_stage: bool) -> str | None:
        self._talk(None if is_first_stage else "recv_prev")
        return None if is_first_stage else "input"

    def recv_backward(self, shape: Any, is_last_stage: bool) -> str | None:
        self._talk(None if is_last_stage else "recv_next")
        return None if is_last_stage else "gradient"

    def send_forward(self, output: Any, is_last_stage: bool) -> None:
        self._talk(None if is_last_stage else f"send_next {output[0]}")

    def send_backward(self, gradient: Any, is_first_stage: bool) -> None:
        self._talk(None if is_first_stage else f"send_prev {gradient}")

    def send_forward_recv_backward(self, output: Any, shape: Any, is_last_stage: bool) -> str | None:
        self._talk(*(() if is_last_stage else (f"send_next {output[0]}", "recv_next")))
        return None if is_last_stage else "gradient"

    def send_backward_recv_forward(self, gradient: Any, shape: Any, is_first_stage: bool) -> str | None:
        self._talk(*(() if is_first_stage else (f"send_prev {gradient}", "recv_prev")))
        return None if is_first_stage else "input"

    def send_forward_recv_forward(
        self, output: Any, recv_prev: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        handles = self._talk(output and f"send_next {output[0]}", recv_prev and "recv_prev", overlap=overlap_p2p_comm)
        return ("input", handles) if overlap_p2p_comm else "input"

    def send_backward_recv_backward(
        self, input_tensor_grad: Any, recv_next: bool, tensor_shape: Any, overlap_p2p_comm: bool = False
    ) -> Any:
        gradient = input_tensor_grad
        handles = self._talk(gradient and f"send_prev {gradient}", recv_next and "recv_next", overlap=overlap_p2p_comm)
        return ("gradient", handles) if overlap_p2p_comm else "gradient"

    def send_forward_backward_recv_forward_backward(
        self, output: Any, gradient: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any
    ) -> tuple[str, str]:
        self._talk(
            output and f"send_next {output[0]}",
            gradient and f"send_prev {gradient}",
            recv_prev and "recv_prev",
            recv_next and "recv_next",
        )
        return "input", "gradient"


def megatron_order(case: Case, rank: int) -> list[str]:
    """What one rank does."""
    log: list[str] = []
    config = SimpleNamespace(
        **dict.fromkeys(
            ("finalize_model_grads_func", "timers", "no_sync_func", "grad_sync_func", "param_sync_func")
        ),
        num_microbatches_with_partial_activation_checkpoints=None,
        overlap_p2p_comm=case["overlap"],
        batch_p2p_comm=not case["overlap"],
        overlap_p2p_comm_warmup_flush=False,
        overlap_moe_expert_parallel_comm=False,
        fine_grained_activation_offloading=False,
        deallocate_pipeline_outputs=False,
        microbatch_group_size_per_vp_stage=case["group"] or case["ranks"],
        virtual_pipeline_model_parallel_size=case["chunks"] if case["chunks"] > 1 else None,
        sequence_parallel=False,
        hidden_size=1,
        calculate_per_token_loss=False,
        variable_seq_lengths=False,
    )
    models = [torch.nn.Identity() for _ in range(case["chunks"])]
    backwards = [0] * case["chunks"]

    def forward_step(*args: Any, current_microbatch: int, **kwargs: Any) -> tuple[list[str], int]:
        chunk = kwargs.get("vp_stage") or 0
        log.append(f"forward {current_microbatch}.{chunk}")
        return [f"F{current_microbatch}.{chunk}"], 0

    def backward_step(input_tensor: Any, output_tensor: list[str], *args: Any) -> str:
        name = output_tensor[0].removeprefix("F")
        chunk = int(name.partition(".")[2])
        assert name == f"{backwards[chunk]}.{chunk}", "megatron-core runs backward passes of a chunk in order"
        backwards[chunk] += 1
        log.append(f"backward {name}")
        return f"B{name}"

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    schedules.get_model_config = lambda model: config
    schedules.get_model_type = lambda model: None
    schedules.get_tensor_shapes = lambda **kwargs: [(1,)]
    schedules.nvtx_range_push = schedules.nvtx_range_pop = lambda *args, **kwargs: None
    utils.get_pg_rank, utils.get_pg_size = Group.rank, Group.size
    one = Group(1, 0)
    groups = SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=None, dp_cp=one)
    run = (
        schedules.forward_backward_pipelining_with_interleaving
        if case["chunks"] > 1
        else schedules.forward_backward_pipelining_without_interleaving
    )
    run(
        forward_step_func=None,
        data_iterator=[None] * case["chunks"],
        model=models,
        num_microbatches=case["microbatches"],
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=Communicator(case, rank, config, log),
        pg_collection=groups,
    )
    return log


def deepspeed_order(case: Case, rank: int) -> list[str]:
    """What TrainSchedule has one rank do."""
    import deepspeed.runtime.pipe.schedule as pipe

    spelled = {
        pipe.ForwardPass: "forward {}.0",
        pipe.BackwardPass: "backward {}.0",
        pipe.SendActivation: "block send_next F{}.0",
        pipe.SendGrad: "block send_prev B{}.0",
        pipe.RecvActivation: "block recv_prev",
        pipe.RecvGrad: "block recv_next",
    }
    steps = pipe.TrainSchedule(case["microbatches"], case["ranks"], rank).steps()
    found = [one for step in steps for one in step if type(one) in spelled]
    return [spelled[type(one)].format(one.buffer_id) for one in found]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what frameworks print is no answer
    zeros = torch.zeros
    torch.zeros = lambda *args, device=None, **kwargs: zeros(*args, **kwargs)  # type: ignore[assignment]
    for line in sys.stdin:
        case = json.loads(line)
        find = {"megatron": megatron_order, "deepspeed": deepspeed_order}[case["framework"]]
        answers.write(json.dumps([find(case, rank) for rank in range(case["ranks"])]) + "\n")


if __name__ == "__main__":
    main()
