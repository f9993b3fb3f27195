"""Run by test_schedules.py: what the schedules of megatron-core and DeepSpeed do on each rank, in order.

Megatron-core: the functions of `pipeline_parallel.schedules` run unchanged; passes and network are stand-ins, each call
of the communicator and each wait for a handle is written down. DeepSpeed: the instructions of its `TrainSchedule`; its
buffers stand where microbatches are named.

In: JSON lines on standard input, {framework, ranks, microbatches, chunks, group, overlap}. Out: a JSON line for each,
by rank the list of what is done, spelled as `test_schedules.words` spells a program.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules, utils

Case = dict[str, Any]


class Group:
    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


class Rank:
    """What one rank has done."""

    def __init__(self, case, rank):
        self.case, self.rank, self.log = case, rank, list[str]()

    def talk(self, *parts, overlap=False):
        """All at once; handles where it is not waited for."""
        found = [part for part in parts if part]
        if found:
            self.log.append(("begin " if overlap else "block ") + ", ".join(found))
        return {part.split()[0]: Handle(self, part) for part in found} if overlap else {}


class Handle:
    def __init__(self, rank, what):
        self._log, self._what = rank.log, what

    def wait(self):
        self._log.append(f"wait {self._what}")


class Communicator:
    """Sends and receives nothing; a tensor is the text that names its maker."""

    def __init__(self, rank, config):
        case = rank.case
        self.pp_group, self.config, self._talk = Group(case["ranks"], rank.rank), config, rank.talk
        self.virtual_pipeline_model_parallel_size = case["chunks"] if case["chunks"] > 1 else None

    def recv_forward(self, shape, is_first_stage):
        self._talk(None if is_first_stage else "recv_prev")
        return None if is_first_stage else "input"

    def recv_backward(self, shape, is_last_stage):
        self._talk(None if is_last_stage else "recv_next")
        return None if is_last_stage else "gradient"

    def send_forward(self, output, is_last_stage):
        self._talk(None if is_last_stage else f"send_next {output[0]}")

    def send_backward(self, gradient, is_first_stage):
        self._talk(None if is_first_stage else f"send_prev {gradient}")

    def send_forward_recv_backward(self, output, shape, is_last_stage):
        self._talk(*(() if is_last_stage else (f"send_next {output[0]}", "recv_next")))
        return None if is_last_stage else "gradient"

    def send_backward_recv_forward(self, gradient, shape, is_first_stage):
        self._talk(*(() if is_first_stage else (f"send_prev {gradient}", "recv_prev")))
        return None if is_first_stage else "input"

    def send_forward_recv_forward(self, output, recv_prev, tensor_shape, overlap_p2p_comm=False):
        handles = self._talk(output and f"send_next {output[0]}", recv_prev and "recv_prev", overlap=overlap_p2p_comm)
        return ("input", handles) if overlap_p2p_comm else "input"

    def send_backward_recv_backward(self, input_tensor_grad, recv_next, tensor_shape, overlap_p2p_comm=False):
        gradient = input_tensor_grad
        handles = self._talk(gradient and f"send_prev {gradient}", recv_next and "recv_next", overlap=overlap_p2p_comm)
        return ("gradient", handles) if overlap_p2p_comm else "gradient"

    def send_forward_backward_recv_forward_backward(self, output, gradient, recv_prev, recv_next, tensor_shape):
        self._talk(
            output and f"send_next {output[0]}",
            gradient and f"send_prev {gradient}",
            recv_prev and "recv_prev",
            recv_next and "recv_next",
        )
        return "input", "gradient"


running = SimpleNamespace()  # .rank: whose schedule is run


def forward_step(*args, current_microbatch, **kwargs):
    name = f"{current_microbatch}.{kwargs.get('vp_stage') or 0}"
    running.rank.log.append(f"forward {name}")
    return [f"F{name}"], 0


def backward_step(input_tensor, output_tensor, *args):
    name = output_tensor[0].removeprefix("F")
    running.rank.log.append(f"backward {name}")
    return f"B{name}"


def stand_in():
    """Passes, models and groups."""
    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    schedules.get_model_config = lambda model: running.config
    schedules.get_model_type = lambda model: None
    schedules.get_tensor_shapes = lambda **kwargs: [(1,)]
    schedules.nvtx_range_push = schedules.nvtx_range_pop = lambda *args, **kwargs: None
    utils.get_pg_rank, utils.get_pg_size = Group.rank, Group.size
    zeros = torch.zeros
    torch.zeros = lambda *args, device=None, **kwargs: zeros(*args, **kwargs)


def megatron(rank):
    """One iteration of one rank."""
    case, nothing = rank.case, ("finalize_model_grads_func", "timers", "no_sync_func", "grad_sync_func")
    config = SimpleNamespace(
        **dict.fromkeys((*nothing, "param_sync_func", "num_microbatches_with_partial_activation_checkpoints")),
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
    running.rank, running.config = rank, config
    one = Group(1, 0)
    run = (
        schedules.forward_backward_pipelining_with_interleaving
        if case["chunks"] > 1
        else schedules.forward_backward_pipelining_without_interleaving
    )
    run(
        forward_step_func=None,
        data_iterator=[None] * case["chunks"],
        model=[torch.nn.Identity() for _ in range(case["chunks"])],
        num_microbatches=case["microbatches"],
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=Communicator(rank, config),
        pg_collection=SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=None, dp_cp=one),
    )


def deepspeed(rank):
    """What TrainSchedule has one rank do."""
    import deepspeed.runtime.pipe.schedule as pipe

    spelled = {
        pipe.ForwardPass: "forward {}.0",
        pipe.BackwardPass: "backward {}.0",
        pipe.SendActivation: "send_next F{}.0",
        pipe.SendGrad: "send_prev B{}.0",
        pipe.RecvActivation: "recv_prev",
        pipe.RecvGrad: "recv_next",
    }
    for step in pipe.TrainSchedule(rank.case["microbatches"], rank.case["ranks"], rank.rank).steps():
        for one in step:
            if type(one) in spelled:
                act = rank.log.append if isinstance(one, pipe.ForwardPass | pipe.BackwardPass) else rank.talk
                act(spelled[type(one)].format(one.buffer_id))


def answer(case):
    """By rank."""
    ranks = [Rank(case, rank) for rank in range(case["ranks"])]
    for one in ranks:
        {"megatron": megatron, "deepspeed": deepspeed}[case["framework"]](one)
    return [one.log for one in ranks]


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what frameworks print is no answer
    stand_in()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
