"""One rank of the emulated cluster: Megatron's own pipeline with stages that sleep instead of computing.

megatron-core's schedule, messages between stages, DDP, gradient reduction, clipping and optimizer are real, and so are
the adapter, session, capture, SMP and exchange. Of a forward or backward pass only its length is emulated. A stage has
a given number of parameters in `LAYERS` layers; a message between stages is sequence x micro batch x hidden float32.

Iterations run in blocks of one mode each, so that modes are compared within one run:

    on      protected: captured after each iteration, copies in bubbles
    off     not protected: no spans, no capture, closed gate. The SMPs still run, and around each update there is the
            check of a job with `--ftp` alone whether another rank has lost its protection
    once    as off, and after each update every rank sends the same bytes to the same rank at once and waits for them,
            as FTPipeHD does

Invariant: all ranks change mode in the same iteration. The first iteration of a block belongs to the previous one (its
capture and frames are still in flight) and is discarded. The host counts only protected iterations, so that versions
have no gaps.

In: the example's flags, `--stages` (a JSON list of `StageSpec`), `--blocks`, `--out`. Out: a JSON file per rank with
wall and processor seconds of each iteration by block; rank 0 adds the profile.
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

from ft_plugins.bubbles.timeline.timeline_values import pack
from ft_plugins.config import launch_context
from ft_plugins.model.host import Edges
from ft_plugins.model.timeline import Kind
from ft_plugins.session import Session, attach
from harness import megatron_runs
from harness.forkserver import load

ON, ONCE, OFF = "on", "once", "off"
LAYERS = 6  # of a stage


@dataclass(frozen=True)
class StageSpec:
    """Seconds of a pass through a rank's chunks, and float32 parameters of a rank. `jitter`: maximum deviation of a
    pass, as a share of it. After `drift_after` seconds of training, passes take `drift` times as long."""

    forward: float
    backward: float
    parameters: int
    jitter: float = 0.0
    drift: float = 1.0
    drift_after: float = 0.0


class Sleeper:
    """Sleeps instead of computing; deterministic for one seed.

    A real device finishes a pass regardless of the node's cores; here a pass ends when its rank gets a core. So the
    excess of one pass is taken off the next, less any pause between them, in which a device would have caught up. No
    other wait of a rank is compensated.
    """

    def __init__(
        self, spec: StageSpec, seed: int, sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._spec, self._seed, self._sleep, self._clock = spec, seed, sleep, clock
        self.draw_from(0)
        self._began = self._ended = clock()
        self._excess = 0.0

    def draw_from(self, number: int) -> None:
        """Draw jitter from sequence `number` from now on. Blocks that are compared share a sequence."""
        self._random = random.Random(f"{self._seed} {number}")

    def sleep(self, seconds: float) -> None:
        spec = self._spec
        if spec.jitter:
            seconds *= 1 + self._random.uniform(-spec.jitter, spec.jitter)
        if spec.drift != 1.0 and self._clock() - self._began > spec.drift_after:
            seconds *= spec.drift
        began = self._clock()
        self._excess = max(0.0, self._excess - (began - self._ended))
        self._sleep(max(0.0, seconds - self._excess))
        self._ended = self._clock()
        self._excess = min(self._excess + self._ended - began - seconds, seconds)


class SwitchableEdges:
    """Reports edges only while `on`."""

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
    """Returns its input after the seconds of a pass. Every parameter gets a gradient."""

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
        """A model chunk. Megatron's schedule sets its input tensor."""

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

        def set_input_tensor(self, tensor: Any) -> None:
            self._input = tensor[0] if isinstance(tensor, list) else tensor

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
        """The example's job except for model and data."""

        def _build_chunks(self) -> list[Any]:
            real = super()._build_chunks()  # for their configurations
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
    """Run one rank."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--stages", required=True, help="JSON: a StageSpec per stage")
    parser.add_argument("--blocks", type=Path, required=True, help="JSON: pairs of a mode and a number of iterations")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    own, rest = parser.parse_known_args(argv)
    example, context = load(str(megatron_runs.EXAMPLE)), launch_context()
    args = example.parse(rest)
    torch.set_num_threads(1)
    torch.cuda.set_device(context.local_rank)
    dist.init_process_group("gloo")
    job = _job_class([StageSpec(**one) for one in json.loads(own.stages)])(args, context)
    host = job.host()
    switches: list[SwitchableEdges] = []
    install = host.install_edges

    def install_switchable(edges: Edges) -> None:
        switches.append(SwitchableEdges(edges))
        install(switches[0])

    host.install_edges = install_switchable
    assert context.config is not None
    session = attach(host, context.config, context)
    session.resume()
    blocks = _run(job, host, session, switches[0], json.loads(own.blocks.read_text()))
    _write(session, context.rank, blocks, own.out)
    session.shutdown()
    dist.barrier()
    job.close()
    dist.destroy_process_group()


def _run(
    job: Any, host: Any, session: Session, edges: SwitchableEdges, blocks: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Run all blocks. Per block: mode, wall and processor seconds of all iterations, and the number of protected
    iterations at its end."""
    results = []
    for number, (mode, count) in enumerate(blocks):
        seconds, processor = [], []
        for chunk in job.chunks:
            chunk.module.sleeper.draw_from((number + 1) // 2)  # one for the first block, then one per pair
        edges.on = mode == ON
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
                job.iteration = step - 1  # counts protected iterations only
            if at_once is not None:
                at_once.send()
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
        results.append({"mode": mode, "seconds": seconds, "processor": processor, "completed": job.iteration})
    return results


class _AtOnce:
    """Sends the planned copies by torch.distributed instead of the SMPs."""

    def __init__(self, session: Session) -> None:
        assert session.measured is not None and session.measured.baft is not None
        plan, rank = session.measured.baft.copies, dist.get_rank()
        assert plan is not None
        copies = plan.copies
        self._sent = torch.zeros(copies[rank].nbytes, dtype=torch.uint8)
        self._receiver = copies[rank].receiver
        self._received = {
            one.rank: torch.empty(one.nbytes, dtype=torch.uint8) for one in copies if one.receiver == rank
        }

    def send(self) -> None:
        requests: list[Any] = [dist.isend(self._sent, self._receiver)]
        requests += [dist.irecv(buffer, rank) for rank, buffer in self._received.items()]
        for request in requests:
            request.wait()


def _write(session: Session, rank: int, blocks: list[dict[str, Any]], out: Path) -> None:
    profile = session.measured.profile if session.measured is not None else None
    timelines = [pack(one) for one in profile.timelines] if profile is not None and rank == 0 else []
    (out / f"rank-{rank:05d}.json").write_text(json.dumps({"blocks": blocks, "profile": timelines}))
