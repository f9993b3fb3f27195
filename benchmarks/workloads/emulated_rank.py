"""One rank of the emulated cluster: Megatron's own pipeline, whose stages sleep instead of computing.

Real are megatron-core's schedule, its messages between stages, DDP, gradient reduction, clipping and optimizer, the
adapter, the session, capture, SMP and exchange; of a forward or backward pass only its length is left. A stage's state
has a given number of bytes, in `LAYERS` layers; a message between stages is sequence x micro batch x hidden
float32.

Iterations are run in blocks, each in one mode, so that modes are compared within one run:

    on      protected: captured after each iteration, copies go in bubbles
    off     nothing is protected: no spans, no capture, and the gate stays closed; the SMPs are there, and around each
            update is what a job with `--ftp` alone has, a look whether another rank has lost its protection
    once    as off, and after each update every rank sends the same bytes to the same rank at once, and waits for them:
            what FTPipeHD does

Invariant: what is off is off on all ranks, by counting iterations; the first iteration of a block belongs to what
was before (its capture, its frames in flight) and is not counted. The host counts protected iterations only, so that
versions follow each other without holes.

In: the example's flags, and `--stages` (a JSON list of `StageSpec`), `--blocks`, `--out`. Out: a JSON file for each
rank with seconds of each counted iteration, and those of the processor that its process took, by block; and from rank 0
the profile.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_plugins.bubbles.timeline_values import pack
from ft_plugins.config import launch_context
from ft_plugins.model.host import Edges
from ft_plugins.model.timeline import Kind
from ft_plugins.session import Session, attach
from ft_plugins.testing import megatron_runs
from ft_plugins.testing.forkserver import load

ON, ONCE, OFF = "on", "once", "off"
LAYERS = 6  # of a stage


@dataclass(frozen=True)
class StageSpec:
    """What a stage is: seconds of a pass through a rank's chunks, and float32 parameters of a rank. `jitter`: each pass
    takes up to so much more or less, as a share of it. After `drift_after` seconds of training all take `drift` times
    as long."""

    forward: float
    backward: float
    parameters: int
    jitter: float = 0.0
    drift: float = 1.0
    drift_after: float = 0.0


class Sleeper:
    """Sleeps as a stage computes; the same every time for one seed.

    A device of the testbed is done when it is done, whatever the node's cores do; here a pass is over when its rank has
    got a core. So what one pass took too long the next one takes less, as far as it can, and as far as no pause lay
    between them, in which a device would have caught up. Nothing else that a rank waits for is made up for.
    """

    def __init__(
        self, spec: StageSpec, seed: int, sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._spec, self._seed, self._sleep, self._clock = spec, seed, sleep, clock
        self.draw_from(0)
        self._began = self._ended = clock()
        self._over = 0.0

    def draw_from(self, number: int) -> None:
        """From now on jitter is drawn from the sequence of that number: blocks that are compared have the same."""
        self._random = random.Random(f"{self._seed} {number}")

    def sleep(self, seconds: float) -> None:
        spec = self._spec
        if spec.jitter:
            seconds *= 1 + self._random.uniform(-spec.jitter, spec.jitter)
        if spec.drift != 1.0 and self._clock() - self._began > spec.drift_after:
            seconds *= spec.drift
        began = self._clock()
        self._over = max(0.0, self._over - (began - self._ended))
        self._sleep(max(0.0, seconds - self._over))
        self._ended = self._clock()
        self._over = min(self._over + self._ended - began - seconds, seconds)


class Switch:
    """Reports edges only while it is `on`."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self.on = True

    def begin(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        if self.on:
            self._edges.begin(kind, microbatch, chunk)

    def end(self, kind: Kind, microbatch: int = -1, chunk: int = 0) -> None:
        if self.on:
            self._edges.end(kind, microbatch, chunk)


class _Sleep(torch.autograd.Function):
    """Hands on what it gets, after so many seconds; every parameter gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, spec: StageSpec, sleeper: Sleeper, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.spec, ctx.sleeper, ctx.like = spec, sleeper, parameters
        sleeper.sleep(spec.forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.sleeper.sleep(ctx.spec.backward)
        return (gradient, None, None, *(torch.full_like(one, 1e-3) for one in ctx.like))


def _stage_class() -> type[torch.nn.Module]:
    from megatron.core.enums import ModelType
    from megatron.core.transformer.module import MegatronModule

    class SleepingStage(MegatronModule):  # type: ignore[misc]
        """A model chunk: Megatron's schedule hands it what came from the stage before."""

        model_type = ModelType.encoder_or_decoder
        share_embeddings_and_output_weights = False

        def __init__(self, config: Any, spec: StageSpec, shape: tuple[int, ...], first: bool, last: bool) -> None:
            super().__init__(config)
            self.pre_process, self.post_process = first, last
            self._spec, self._shape = spec, shape
            self.sleeper = Sleeper(spec, torch.distributed.get_rank())
            self._input: torch.Tensor | None = None
            sizes = [spec.parameters // LAYERS + (number < spec.parameters % LAYERS) for number in range(LAYERS)]
            self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.rand(size)) for size in sizes)

        def set_input_tensor(self, given: Any) -> None:
            self._input = given[0] if isinstance(given, list) else given

        def forward(self) -> torch.Tensor:
            hidden = torch.zeros(self._shape) if self.pre_process else self._input
            return _Sleep.apply(hidden, self._spec, self.sleeper, *self.layers)  # type: ignore[no-any-return]

    return SleepingStage


def _job_class(stages: Sequence[StageSpec]) -> type:
    """The example's job with another model and no data."""
    from gpt_job import Job  # type: ignore[import-not-found]
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    class SleepingJob(Job):  # type: ignore[misc]
        """Everything but model and data is the example's."""

        def _build_chunks(self) -> list[Any]:
            real = super()._build_chunks()  # for its configurations
            count, stage = len(real), stages[parallel_state.get_pipeline_model_parallel_rank()]
            part = replace(
                stage,
                forward=stage.forward / count,
                backward=stage.backward / count,
                parameters=stage.parameters // count,
            )
            shape = (self.args.sequence, self.args.micro_batch, self.args.hidden)
            chunks = []
            for index, chunk in enumerate(real):
                place = {"ignore_virtual": False, "vp_stage": index} if count > 1 else {}
                ends = (
                    parallel_state.is_pipeline_first_stage(**place), parallel_state.is_pipeline_last_stage(**place),
                )  # fmt: skip
                model = _stage_class()(self.config, part, shape, *ends)
                wrapped = DistributedDataParallel(self.config, chunk.ddp_config, model, disable_bucketing=index > 0)
                chunks.append(wrapped)
            return chunks

        def _samplers(self, text: Any) -> list[None]:
            return [None] * len(self.chunks)

        def _forward_step(self, samplers: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                mean = output.float().mean()
                return mean, {"lm loss": mean.detach().clone()}

            return chunk(), loss

    return SleepingJob


def main(argv: Sequence[str]) -> None:
    """One rank."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--stages", required=True, help="JSON: what each stage is")
    parser.add_argument("--blocks", type=Path, required=True, help="JSON: lists of a mode and a count of iterations")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    own, rest = parser.parse_known_args(argv)
    example, context = load(str(megatron_runs.EXAMPLE)), launch_context()
    args = example.parse(rest)
    torch.set_num_threads(1)
    torch.cuda.set_device(context.local_rank)
    dist.init_process_group("gloo")
    job = _job_class([StageSpec(**one) for one in json.loads(own.stages)])(args, context)
    host = job.host()
    switch: list[Switch] = []
    install = host.install_edges

    def switched(edges: Edges) -> None:
        switch.append(Switch(edges))
        install(switch[0])

    host.install_edges = switched
    assert context.config is not None
    session = attach(host, context.config, context)
    session.resume()
    blocks = _run(job, host, session, switch[0], json.loads(own.blocks.read_text()))
    _write(session, context.rank, blocks, own.out)
    session.shutdown()
    dist.barrier()
    job.close()
    dist.destroy_process_group()


def _run(
    job: Any, host: Any, session: Session, switch: Switch, blocks: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Each block: its mode, seconds of its iterations and of the processor in them, the first included, how many were
    protected at its end."""
    found = []
    for number, (mode, count) in enumerate(blocks):
        seconds, processor = [], []
        for chunk in job.chunks:
            chunk.module.sleeper.draw_from((number + 1) // 2)  # the first one stands alone, the others in pairs
        switch.on = mode == ON
        at_once = _AtOnce(session) if mode == ONCE else None
        for _ in range(count + 1):
            began, used = time.perf_counter(), time.process_time()
            step = job.iteration + 1
            if mode == ON:
                session.iteration_begin(step)
                job.train_step(skip=partial(host.skip_update, session))
                session.iteration_end(step)
            else:
                job.train_step(skip=partial(host.skip_update, session))
                job.iteration = step - 1  # not a protected one
            if at_once is not None:
                at_once.send()
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
        found.append({"mode": mode, "seconds": seconds, "processor": processor, "completed": job.iteration})
    return found


class _AtOnce:
    """Copies as they are planned, by torch.distributed instead of the SMPs."""

    def __init__(self, session: Session) -> None:
        assert session.measured is not None and session.measured.baft is not None
        guarded, rank = session.measured.baft.copies, dist.get_rank()
        assert guarded is not None
        copies = guarded.copies
        self._out = torch.zeros(copies[rank].nbytes, dtype=torch.uint8)
        self._to = copies[rank].receiver
        self._into = {one.rank: torch.empty(one.nbytes, dtype=torch.uint8) for one in copies if one.receiver == rank}

    def send(self) -> None:
        requests: list[Any] = [dist.isend(self._out, self._to)]
        requests += [dist.irecv(room, rank) for rank, room in self._into.items()]
        for request in requests:
            request.wait()


def _write(session: Session, rank: int, blocks: list[dict[str, Any]], out: Path) -> None:
    profile = session.measured.profile if session.measured is not None else None
    timelines = [pack(one) for one in profile.timelines] if profile is not None and rank == 0 else []
    (out / f"rank-{rank:05d}.json").write_text(json.dumps({"blocks": blocks, "profile": timelines}))
