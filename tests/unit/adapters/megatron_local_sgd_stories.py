"""Stories about local SGD on whole Megatron jobs: three synchronisations equal a simulation of the replicas in turn; or
one, with some layers averaged in each iteration before and after it.

All comparisons are bit for bit: a replica alone does the same arithmetic in the same order as in the job, and the mean
of two has one order. With the penalty, sums of norms have another order, so weights and clip factors may differ by
2 ** -53; a parameter could differ only where its float64 value lies that close to the middle between two numbers of
fp32: one in a hundred million.
"""

import functools
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from megatron_gangs import BF16, INTERLEAVED, OVERLAPPED, SHARDED, gang_job, large, norms_over_sequences
from megatron_simulated import Simulated, copied, whole

from ft_plugins.config import Config, launch_context
from ft_plugins.session import attach
from harness.gang import gang

STEPS, TAU, SAMPLES = 7, 2, 4  # three synchronisations, and an iteration behind the last one; samples an iteration
POST = {"policy": "post_local_sgd", "tau": TAU}
EDIT = {"policy": "edit", "tau": TAU, "alpha": 0.3, "threshold": 1.0, "penalty_warmup": 2, "clip": 0.08}
EVEN = {"policy": "dreamddp", "tau": 5, "h": 2, "schedule": "equal"}
UNTIED = {"share_embeddings_and_output_weights": False}
GATHERED = [*OVERLAPPED, "--overlap-param-gather"]


class Case(NamedTuple):
    """A job of 8 ranks: two pipeline stages, two replicas of `members` data-parallel ranks each. `turns`: the modules
    that DreamDDP averages in each iteration of a period."""

    sync: dict[str, Any]
    apply: str
    flags: list[str]
    distributed: bool = False
    members: int = 1
    tied: bool = True
    sequence_parallel: bool = False
    turns: tuple[frozenset[str], ...] = ()

    @property
    def tp(self):
        return 2 // self.members

    @property
    def keys(self):
        return {**self.sync, "apply": self.apply} if self.apply else self.sync

    @property
    def more(self):
        model = {} if self.tied else {"gpt": UNTIED}
        return {**model, **({"sequence_parallel": True} if self.sequence_parallel else {})}

    def words(self, whole):
        """The flags of the whole job, or of one of its replicas."""
        words = ["--tp", str(self.tp), *(() if "--pp" in self.flags else ("--pp", "2")), *self.flags]
        if self.distributed:
            words += [*SHARDED, "2"] if whole else ["--distributed-optimizer"]
        return [*words, "--global-batch", str(SAMPLES if whole else SAMPLES // 2)]

    def place(self, rank):
        """The replica of a rank of the job, and the rank of a job of that replica alone."""
        stage, rest = divmod(rank, 4)
        number, tensor = divmod(rest, self.tp)
        replica, member = divmod(number, self.members)
        return replica, (stage * self.members + member) * self.tp + tensor


def turns(*those):
    return tuple(frozenset(one.split(", ")) for one in those)


# an embedding of both stages comes first; the others by stage, in the order of the backward
TIED = turns("embedding, layer 1, head", "layer 2")
APART = turns("layer 1, head", "embedding, layer 2")  # the stages hold embedding and layer 1, layer 2 and head
CHUNKS = turns("embedding, layer 3, head, layer 4", "layer 1, layer 2")
ALL = turns("embedding, layer 1, layer 2, head")
FORWARD = {
    "fp32, edit": Case(EDIT, "forward", []),
    "fp32, overlap, untied, post": Case(POST, "wait", OVERLAPPED, tied=False),
    "fp32, interleaved, overlap, edit": Case(EDIT, "forward", [*INTERLEAVED, *OVERLAPPED]),
    "fp32, sequence parallel, edit": Case(EDIT, "forward", [], sequence_parallel=True),
    "fp32, interleaved, dreamddp": Case(EVEN, "", INTERLEAVED, turns=CHUNKS),
}
SHARDS = {
    "fp32, instances, post": Case(POST, "wait", [], distributed=True),
    "bf16, instances, overlap, edit": Case(EDIT, "update", [*BF16, *GATHERED], distributed=True),
    "bf16, instances, interleaved, untied, edit": Case(EDIT, "wait", [*BF16, *INTERLEAVED], True, tied=False),
    "bf16, instances of 2, forward, edit": Case(EDIT, "forward", BF16, distributed=True, members=2),
}
MORE = {
    "fp32, post": Case(POST, "forward", []),
    "fp32, untied, edit": Case(EDIT, "wait", [], tied=False),
    "fp32, late, edit": Case(EDIT, "update", []),
    "fp32, interleaved, untied, post": Case(POST, "wait", INTERLEAVED, tied=False),
    "fp32, interleaved, sequence parallel, post": Case(POST, "forward", INTERLEAVED, sequence_parallel=True),
    "bf16, edit": Case(EDIT, "update", BF16),
    "bf16, interleaved, overlap, sequence parallel, edit": Case(
        EDIT, "wait", [*BF16, *INTERLEAVED, *OVERLAPPED], sequence_parallel=True
    ),
    "fp32, instances, overlap, edit": Case(EDIT, "update", GATHERED, distributed=True),
    "bf16, instances, post": Case(POST, "wait", BF16, distributed=True),
    "bf16, instances, interleaved, overlap, post": Case(POST, "update", [*BF16, *INTERLEAVED, *GATHERED], True),
    "fp32, instances of 2, edit": Case(EDIT, "wait", [], distributed=True, members=2),
    "bf16, instances of 2, overlap, edit": Case(EDIT, "update", [*BF16, *GATHERED], distributed=True, members=2),
}
COPIES = {
    "bf16, interleaved, forward, edit": Case(EDIT, "forward", [*BF16, *INTERLEAVED]),
    "fp32, instances of 2, untied, forward, post": Case(POST, "forward", [], True, members=2, tied=False),
    "bf16, instances of 2, overlap, forward, edit": Case(EDIT, "forward", [*BF16, *GATHERED], True, members=2),
    "bf16, instances, interleaved, overlap, forward": Case(EDIT, "forward", [*BF16, *INTERLEAVED, *GATHERED], True),
}
LAYERED = {
    "fp32, dreamddp": Case(EVEN, "", [], turns=TIED),
    "fp32, overlap, untied, dreamddp": Case(EVEN, "", OVERLAPPED, tied=False, turns=APART),
    "fp32, dreamddp in each iteration": Case({**EVEN, "h": 1}, "", [], turns=ALL),
    "bf16, interleaved, overlap, dreamddp": Case(EVEN, "", [*BF16, *INTERLEAVED, *OVERLAPPED], turns=CHUNKS),
    "bf16, instances, overlap, dreamddp": Case(EVEN, "", [*BF16, *GATHERED], distributed=True, turns=TIED),
    "fp32, instances of 2, dreamddp": Case(EVEN, "", [], distributed=True, members=2, turns=TIED),
    "bf16, instances, interleaved, dreamddp": Case(EVEN, "", [*BF16, *INTERLEAVED], distributed=True, turns=CHUNKS),
}


# ---- the job


def _trained(rank, world, cases):
    return [_train(rank, world, case) for case in cases]


def _train(rank, world, case):
    with ExitStack() as stack:
        stack.enter_context(norms_over_sequences())
        job = stack.enter_context(gang_job(rank, world, *case.words(True), **case.more))
        context = replace(launch_context(), rank=rank, world_size=world)
        session = attach(job.host(), Config.from_json({"sync": case.keys}), context)
        events = []
        session._events.subscribe(events.append)
        session.resume(last=STEPS)
        norms, after, on_their_way = [], [], []
        for step in range(1, STEPS + 1):
            session.iteration_begin(step)
            norms.append(job.train_step(skip=lambda: None)["grad_norm"])
            session.iteration_end(step)
            after.append(copied(job))
            if step % TAU == 0 and case.apply == "forward" and "--overlap-param-gather" in case.flags:
                groups = [group for chunk in job.chunks for group in chunk.bucket_groups]
                on_their_way += [
                    not one.param_gather_dispatched or one.param_gather_handle is not None for one in groups
                ]
        session.shutdown()
        synchronised = [one.fields for one in events if one.name == "replicas.synchronised"]
        return {
            "norms": norms, "after": after, "end": whole(job), "on_their_way": on_their_way,
            "clipped": [one["clipped"] for one in synchronised],
            "left_out": [
                {name: [case.place(one)[0] for one in those] for name, those in one["left_out"].items()}
                for one in synchronised
            ],
        }  # fmt: skip


# ---- the comparison


def _simulated(rank, world, cases):
    found = []
    for case in cases:
        with norms_over_sequences():
            simulated = Simulated(rank, world, case.words(False), case.keys, case.members, case.turns, **case.more)
            found.append(simulated.run(STEPS))
    return found


@functools.cache
def _expected(names):
    """By case, the results of all ranks of one replica, by replica."""
    known = FORWARD | SHARDS | MORE | COPIES | LAYERED
    found = gang(_simulated, 4, [known[name] for name in names], seconds=200.0)
    return dict(zip(names, zip(*found, strict=True), strict=True))


def _difference(found, expected, case):
    """The first iteration and the rank in which anything differs in any bit; the end counts as an iteration."""
    pairs = []
    for rank, ours in enumerate(found):
        replica, alone = case.place(rank)
        pairs.append((rank, ours, expected[alone][replica]))
    for step in range(STEPS + 1):
        for rank, ours, theirs in pairs:
            if step < STEPS and ours["norms"][step] != theirs["norms"][step]:
                return step + 1, rank, ["gradient norm"]
            left, right = (one["after"][step] if step < STEPS else one["end"] for one in (ours, theirs))
            assert left.keys() == right.keys(), (rank, sorted(left), sorted(right))
            if names := [name for name in left if not np.array_equal(left[name], right[name])]:
                return step + 1, rank, names
    return None


def _require_equal(cases):
    jobs = gang(_trained, 8, list(cases.values()), seconds=200.0)
    for (name, case), found in zip(cases.items(), zip(*jobs, strict=True), strict=True):
        expected = _expected(tuple(cases))[name]
        assert _difference(list(found), expected, case) is None, (name, _difference(list(found), expected, case))
        assert found[0]["norms"] != found[2]["norms"], "replicas have data of their own"
        for rank, ours in enumerate(found):
            replica, alone = case.place(rank)
            theirs = expected[alone][replica]
            assert ours["left_out"] == theirs["left_out"], (name, rank)
            assert [list(one) for one in ours["clipped"]] == [list(one) for one in theirs["clipped"]], (name, rank)
        if case.sync is EDIT:
            judged = [one["left_out"][2] for one in found]
            assert any(judged) and any(len(one) < 2 for one in judged), (name, judged)
            clipped = [one for ours in found for one in ours["clipped"]]
            assert any(clipped), name


def it_equals_replicas_in_turn_without_the_distributed_optimizer():
    _require_equal(FORWARD)


def it_equals_replicas_in_turn_with_instances_of_the_distributed_optimizer():
    _require_equal(SHARDS)


@large
def it_equals_replicas_in_turn_in_every_mode():
    _require_equal(MORE)


@large
def it_equals_replicas_in_turn_when_copies_are_derived_before_each_forward():
    """And the same job whose training waits. No gather of Megatron's is started or on its way when they are written."""
    _require_equal(COPIES)
    cases = [one for case in COPIES.values() for one in (case, case._replace(apply="wait"))]
    for ranks in gang(_trained, 8, cases, seconds=200.0):
        for ours, waiting in zip(ranks[::2], ranks[1::2], strict=True):
            assert ours["norms"] == waiting["norms"]
            assert all(np.array_equal(ours["end"][name], one) for name, one in waiting["end"].items())
            assert not any(ours["on_their_way"])


@large
def it_equals_replicas_in_turn_when_layers_are_averaged_in_different_iterations():
    _require_equal(LAYERED)
