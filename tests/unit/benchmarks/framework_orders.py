"""Run by test_schedules.py: what the schedules of megatron-core and DeepSpeed do on each rank, and how long that takes.

Megatron-core: the functions of `pipeline_parallel.schedules` run unchanged; passes and network are stand-ins, each call
of the communicator and each wait for a handle is written down. DeepSpeed: the instructions of its `TrainSchedule`; its
buffers stand where microbatches are named.

With times, the ranks are threads that talk to each other, each with a clock of its own that passes and messages move:
the network knows no names, it gives what was sent first to who receives first.

In: JSON lines on standard input, {framework, ranks, microbatches, chunks, group, overlap}, and for times forward,
backward (by stage), hops (by rank), eager. Out: a JSON line for each, by rank the list of what is done, spelled as
`test_schedules.words` spells a program; with times by rank [word, begin, end] of each pass.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules, utils

Case = dict[str, Any]
WAIT_SECONDS = 60.0  # for a thread beside this one


class Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Network:
    """Channels from rank to rank and direction, first in, first out. A message is there when both ends have been
    posted, or `eager` when it has been sent, and takes its hop."""

    def __init__(self, case: Case) -> None:
        self._ranks, self._hops, self._eager = case["ranks"], case["hops"], case["eager"]
        self._ends: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        self._posted = threading.Condition()

    def post(self, what: str, rank: int, now: float) -> tuple[str, int, int]:
        """Which end of which message."""
        kind, to = what.split()[0].split("_")
        forward = (kind, to) in (("send", "next"), ("recv", "prev"))
        sender = rank if kind == "send" else (rank - 1 if forward else rank + 1) % self._ranks
        channel = "F" if forward else "B"
        with self._posted:
            ends = self._ends[kind, sender, channel]
            ends.append(now)
            self._posted.notify_all()
            return kind + channel, sender, len(ends) - 1

    def done(self, end: tuple[str, int, int], now: float) -> float:
        """When that end is through; waits for the other one to be posted."""
        (kind, channel), sender, number = (end[0][:-1], end[0][-1]), *end[1:]
        sent, received = self._ends["send", sender, channel], self._ends["recv", sender, channel]
        with self._posted:
            if self._eager and kind == "send":
                return now
            assert self._posted.wait_for(lambda: min(len(sent), len(received)) > number, WAIT_SECONDS), "no other end"
            begin = sent[number] if self._eager else max(sent[number], received[number])
        return max(now, begin + self._hops[sender if channel == "F" else sender - 1])


class Clock:
    """What one rank has done, and until when. Without times all of it takes no time."""

    def __init__(self, case: Case, rank: int, network: Network | None) -> None:
        self.case, self.rank, self.network = case, rank, network
        self.now, self.log, self.passes = 0.0, list[str](), list[tuple[str, float, float]]()

    def work(self, word: str) -> None:
        self.log.append(word)
        kind, name = word.split()
        if self.network:
            stage = int(name.partition(".")[2]) * self.case["ranks"] + self.rank
            begin, self.now = self.now, self.now + self.case[kind][stage]
            self.passes.append((word, begin, self.now))

    def talk(self, *parts: Any, overlap: bool = False) -> dict[str, Handle]:
        """All at once; handles where it is not waited for."""
        found = [part for part in parts if part]
        if found:
            self.log.append(("begin " if overlap else "block ") + ", ".join(found))
        ends = [self.network.post(part, self.rank, self.now) for part in found] if self.network else []
        if overlap:
            each = ends or [None] * len(found)
            return {part.split()[0]: Handle(self, part, end) for part, end in zip(found, each, strict=True)}
        self.wait(ends)
        return {}

    def wait(self, ends: list[tuple[str, int, int]]) -> None:
        if self.network:
            self.now = max([self.now, *(self.network.done(end, self.now) for end in ends)])


class Handle:
    def __init__(self, clock: Clock, what: str, end: tuple[str, int, int] | None) -> None:
        self._clock, self._what, self._end = clock, what, end

    def wait(self) -> None:
        self._clock.log.append(f"wait {self._what}")
        if self._end is not None:
            self._clock.wait([self._end])


class Communicator:
    """Sends and receives nothing; a tensor is the text that names its maker."""

    def __init__(self, clock: Clock, config: Any) -> None:
        case = clock.case
        self.pp_group, self.config, self._talk = Group(case["ranks"], clock.rank), config, clock.talk
        self.virtual_pipeline_model_parallel_size = case["chunks"] if case["chunks"] > 1 else None

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


running = threading.local()  # .clock: that of the rank whose schedule a thread runs


def forward_step(*args: Any, current_microbatch: int, **kwargs: Any) -> tuple[list[str], int]:
    name = f"{current_microbatch}.{kwargs.get('vp_stage') or 0}"
    running.clock.work(f"forward {name}")
    return [f"F{name}"], 0


def backward_step(input_tensor: Any, output_tensor: list[str], *args: Any) -> str:
    name = output_tensor[0].removeprefix("F")
    running.clock.work(f"backward {name}")
    return f"B{name}"


def stand_in() -> None:
    """Passes, models and groups."""
    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    schedules.get_model_config = lambda model: running.config
    schedules.get_model_type = lambda model: None
    schedules.get_tensor_shapes = lambda **kwargs: [(1,)]
    schedules.nvtx_range_push = schedules.nvtx_range_pop = lambda *args, **kwargs: None
    utils.get_pg_rank, utils.get_pg_size = Group.rank, Group.size
    zeros = torch.zeros
    torch.zeros = lambda *args, device=None, **kwargs: zeros(*args, **kwargs)  # type: ignore[assignment]


def megatron(clock: Clock) -> None:
    """One iteration of one rank."""
    case, nothing = clock.case, ("finalize_model_grads_func", "timers", "no_sync_func", "grad_sync_func")
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
    running.clock, running.config = clock, config
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
        p2p_communicator=Communicator(clock, config),
        pg_collection=SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=None, dp_cp=one),
    )


def deepspeed(clock: Clock) -> None:
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
    for step in pipe.TrainSchedule(clock.case["microbatches"], clock.case["ranks"], clock.rank).steps():
        for one in step:
            if type(one) in spelled:
                act = clock.work if isinstance(one, pipe.ForwardPass | pipe.BackwardPass) else clock.talk
                act(spelled[type(one)].format(one.buffer_id))


def answer(case: Case) -> list[Any]:
    """By rank."""
    network = Network(case) if "hops" in case else None
    clocks = [Clock(case, rank, network) for rank in range(case["ranks"])]
    run = {"megatron": megatron, "deepspeed": deepspeed}[case["framework"]]
    if network is None:
        for clock in clocks:
            run(clock)
        return [clock.log for clock in clocks]
    threads = [threading.Thread(target=run, args=(clock,)) for clock in clocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [clock.passes for clock in clocks]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what frameworks print is no answer
    stand_in()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
