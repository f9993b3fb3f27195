"""Hook a script's own training loop over a DeepSpeed engine, without an edit to the script.

Invariant: a job that is not protected runs DeepSpeed unchanged. A protected engine is restored before
`deepspeed.initialize` returns, so the script sees `engine.global_steps` as after DeepSpeed's own load; data position
and RNG follow right before the first batch is read. An iteration ends with an update, skipped updates included. Its
version point is right before the next iteration begins, or the orderly end: whatever the script does in between
(evaluation, its own random numbers) belongs to it. If nothing shows that an iteration begins, its update does, and its
version point is right after that.

    deepspeed.initialize     checks the block first; builds the engine (with local SGD over replicas), host and
                             session; restores
    engine.train_batch       PipelineEngine: the end of the previous iteration, then iteration_begin
    engine.forward, step     DeepSpeedEngine: the same at the first read or forward after an update
    engine.load_checkpoint   before training: the larger iteration wins. After it: the script's matter, as long as no
                             update follows
    destroy_process_group    the orderly end, unless an exception is under way; or that of the script under ft-run

In: the module `deepspeed`, right after its import. Out: the same module, hooked."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from ...config import Config, LaunchContext, launch_context
from ...errors import ResumeError, UnsupportedError
from ...events import say
from ...session import Session, attach
from ..rng import numbers_drawn
from ..scalar_writers import of_engine
from ..script.script_hooks import is_failing
from ..script.script_hooks import replace_in_deepspeed as replace
from .clients import EngineClient, EngineClients
from .configuration import (
    configuration_argument,
    replica_build,
    resolve,
    settings_of,
)
from .continuing import NOTICE, CounterReads, at_its_own_start, require_equal
from .position import Positions
from .read_ahead import ADVICE, DRAWN, NOTHING_READ, OTHER_THREAD, READ_EARLY, IterationReads
from .shard_groups import ShardGroups, require_known_early

Leave = Callable[[bool], None]  # with whether training ended in order
Join = Callable[[Config, LaunchContext], tuple[LaunchContext, Leave]]

_UNTRACKED = (
    "the data position is not tracked: batches come from none of deepspeed.initialize(training_data=...), "
    "engine.deepspeed_io, deepspeed's RepeatingLoader, or a torch DataLoader; after a restore the script reads from "
    "its own start"
)
_SILENT = (
    "an update came without a forward of the engine in training mode (engine.eval() before the loop, or direct calls "
    "of parts of engine.module): it is captured, but unless batches come from a tracked loader, a restore sets random "
    "numbers only at the first update; call engine.train() before the loop and engine(...) in it"
)

_UNDONE = (
    "the script trains on from a checkpoint that engine.load_checkpoint has loaded since training began, which would "
    "undo iterations that are in snapshots: end the job, and start it with --ftp-resume fresh"
)


class EngineHooks:
    """The hooks of one process; `loop` is set once a protected engine is built."""

    def __init__(self, join: Join | None = None) -> None:
        self._join = join
        self.loop: DeepSpeedLoop | None = None
        self.positions = Positions()
        self.clients = EngineClients(self._built_by, self._trained_by)

    def _trained_by(self, client: EngineClient) -> None:
        if self.loop is not None and self.loop.client is client:
            self.loop.trained()

    def _built_by(self, client: EngineClient) -> None:
        if self.loop is not None and self.loop.client is client:
            self.loop.settle()

    def follow(self, module: ModuleType) -> None:
        """Wrap `deepspeed.initialize`. Raises UnsupportedError if there is none. Iterators may be made before it."""
        replace(module, "initialize", self.initialize)
        self.positions.follow_torch()

    def initialize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`deepspeed.initialize`, which is `original`."""
        from .support import require_supported_settings  # imports DeepSpeed, which is imported by now

        context = launch_context()
        bound = inspect.signature(original).bind_partial(*args, **kwargs)
        given = configuration_argument(bound.arguments)
        known = resolve(given, context)  # before DeepSpeed acts on it
        client = self.clients.current
        if known.systems:  # before anything is built, if that is known by now
            name = "" if client is None else client.name
            require_supported_settings(settings_of(given), bound.arguments.get("optimizer"), known.systems, name)
        build = replica_build(known, bound.arguments.get("model"))
        with nullcontext() if build is None else build.active():
            built = original(*args, **kwargs)
        engine = built[0]
        config = resolve(engine._config._param_dict, context)
        require_known_early(known.sync, config.sync)
        if not config.systems:
            return built
        if self.loop is not None:
            raise UnsupportedError(
                "deepspeed.initialize was called twice, and a second engine cannot be protected: build one engine, "
                "or remove the block ft_plugins from the DeepSpeed configuration"
            )
        leave: Leave = _no_cleanup
        outlives = config.capture is not None  # what is in memory
        if outlives and self._join is not None and context.run_dir is None:
            context, leave = self._join(config, context)
        shards = None if build is None else build.groups
        try:
            self.loop = DeepSpeedLoop(engine, config, context, self.positions, leave, shards, client)
            self.loop.resume()
        except BaseException:
            leave(False)
            raise
        return built

    def finish(self) -> None:
        """The script's orderly end."""
        if self.loop is not None:
            self.loop.shutdown()
            self.loop = None


class DeepSpeedLoop:
    """One protected engine: session, host, and the progress of the script."""

    def __init__(
        self, engine: Any, config: Config, context: LaunchContext, positions: Positions, leave: Leave,
        shards: ShardGroups | None = None, client: EngineClient | None = None,
    ) -> None:  # fmt: skip
        """Build host and session. A collective. Raises what `attach` raises. `leave` is called after `shutdown`."""
        from .core import DeepSpeedHost  # imports DeepSpeed, which is imported by now
        from .support import require_local

        self.engine = engine
        self.client = client
        self._leave = leave
        self._positions = positions
        self._begun = 0  # the last iteration that has begun
        self._guessed = 0  # the iteration begun by a read in evaluation mode, since previous ones trained in that mode
        self._updated: int | None = None  # the iteration whose version point is still to come
        self._said: set[str] = set()
        self._tracked = False  # whether training data were read from a tracked loader
        self._drawn: Any = None  # after an update without a tracked loader: `numbers_drawn`
        self._thread = threading.get_ident()
        self._other_thread = False  # whether one has read a batch
        self._loaded: int | None = None  # the iteration that engine.load_checkpoint returned
        self._left = False  # whether the script has loaded a checkpoint since it trained: no iteration follows
        if config.sync is not None:
            require_local(engine, torch.distributed.get_rank())
        self._host = DeepSpeedHost(engine, positions, shards, client)
        self._host.write_scalars = getattr(client, "write_scalars", None) or of_engine(engine)
        self._captured = config.capture is not None
        self._session: Session = attach(self._host, config, context)
        self._reads = IterationReads()
        self._counters = CounterReads(engine)
        (self._follow_pipeline if hasattr(engine, "train_batch") else self._follow_engine)()
        positions.follow_torch()  # again: kinds of loaders that were imported since
        replace(self.engine, "load_checkpoint", self._loading)
        self._follow_end()
        if client is not None:
            client.follow(engine, self.begin)

    def settle(self) -> None:
        """The client has set itself up: set its loop to where the engine is."""
        self._host.settle()

    def resume(self) -> None:
        """Restore the newest version; if DeepSpeed loaded a checkpoint, the larger iteration wins."""
        iteration = self._session.resume(loaded=self.engine.global_steps)
        if iteration != self.engine.global_steps:
            raise ResumeError(
                f"rank {self._host.rank}: iteration {iteration} was restored, but DeepSpeed's global_steps is "
                f"{self.engine.global_steps}; start with --ftp-resume fresh"
            )
        self._session.last = getattr(self.client, "last", None)
        self._reads = IterationReads(self._host.pace)

    def shutdown(self) -> None:
        """The orderly end of training. Idempotent."""
        leave, self._leave = self._leave, _no_cleanup
        try:
            self._end()
            self._session.shutdown()
        except SystemExit as stop:  # by --ftp-stop-after, with status 0: this is the end anyway
            leave(not stop.code)
            if stop.code:
                raise
        except BaseException:
            leave(False)
            raise
        else:
            leave(True)

    def trained(self) -> None:
        """The client's loop has ended: the version point of the last iteration, unless it was restored."""
        self._end(ends=True)
        self._session.restore_position()
        self._session.wait_for_capture()  # what the client does from here on may change tensors
        self._begun = self._begun or self.engine.global_steps

    def _end(self, ends: bool = False) -> None:
        """The version point of an updated iteration. `ends`: it is the last one of this start."""
        if self._updated is not None:
            iteration, self._updated = self._updated, None
            self._session.iteration_end(iteration, ends)

    def begin(self) -> None:
        """Begin the iteration, unless it has begun."""
        iteration = self.engine.global_steps + 1
        if self._begun != iteration and not self._left:
            if not self._begun or self.client is not None:
                self._require_continuing()
            self._begun = iteration
            self._end()
            self._session.iteration_begin(iteration)

    def _require_continuing(self) -> None:
        """Raises ResumeError if the engine was restored, but the loop begins at its own start."""
        counted = None if self.client is None else self.client.iteration()
        if self.client is not None and counted is not None:
            require_equal(self._host.rank, self.client.name, counted, self.engine.global_steps)
        if self._begun or counted is not None:
            self._counters.end()
            return
        restored, continues = self.engine.global_steps, self._counters.end()
        if not self._host.restored:
            if self._captured and not continues:
                self._say_once(NOTICE)
        elif not continues and self._loaded != restored:
            raise ResumeError(at_its_own_start(self._host.rank, restored, self._loaded))
        self._host.schedule.require_unchanged(self._host.rank)

    # PipelineEngine

    def _follow_pipeline(self) -> None:
        replace(self.engine, "train_batch", self._training_batch)
        replace(self.engine, "_next_batch", self._reading_batch)

    def _training_batch(self, original: Callable[..., Any], data_iter: Any = None) -> Any:
        if data_iter is not None:
            self.engine.set_dataiterator(data_iter)
        self._require_followed(_UNDONE if self._left else None, "")
        if self.engine.data_iterator is not None:
            self._positions.expect("train", self.engine.data_iterator)
        self.begin()
        outcome = original()
        self._updated = self.engine.global_steps
        return outcome

    def _reading_batch(self, original: Callable[..., Any]) -> Any:
        if self.engine.data_iterator is None:
            return original()
        role = "train" if self.engine.module.training else "eval"
        with self._positions.around(role, self.engine.data_iterator):
            return original()

    # DeepSpeedEngine

    def _follow_engine(self) -> None:
        replace(self.engine, "forward", self._going_forward)
        self.engine.module.register_forward_pre_hook(lambda module, args: self._computing(), prepend=True)
        replace(self.engine, "step", self._stepping)
        if self.client is not None and self.client.places_data:
            return  # it reads as it likes
        self._positions.before_read = self._before_read
        self._positions.found_end = lambda: self._reads.reading(-1)

    def _before_read(self, loader: Any) -> None:
        if threading.get_ident() != self._thread:
            self._other_thread = True
            return
        if self._host.silent and self._begun != self.engine.global_steps + 1:  # no later sign that it begins
            self._positions.expect("train" if self.engine.module.training else "eval", loader)
            self._guessed = self.engine.global_steps + 1
            self.begin()
        if self.engine.module.training:  # engine.train() and eval() set the module's flag only
            self._guessed = 0
            self._tracked = True
            self._reads.reading(left=self._positions.has_left())
            if self._positions.was_read_early(loader):
                self._require_followed(READ_EARLY)
            self._positions.expect("train", loader)
            self.begin()
            self._positions.reading("train", loader)
        else:
            self._positions.reading("eval", loader)

    def _going_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._computing()
        return original(*args, **kwargs)

    def _computing(self) -> None:
        """The engine or its module computes something."""
        if not self.engine.module.training:
            self._drawn = None  # an evaluation belongs to the previous iteration
        else:
            self._guessed = 0
            if self._other_thread:
                self._require_followed(OTHER_THREAD)
            if self._begun != self.engine.global_steps + 1:  # no batch was read since the last update
                if self._tracked:
                    self._require_followed(NOTHING_READ)
                elif self._drawn is not None and self._drawn != numbers_drawn():
                    self._require_followed(DRAWN, "")
                else:
                    self._say_once(_UNTRACKED)
            self.begin()

    def _require_followed(self, problem: str | None, advice: str = f". {ADVICE}") -> None:
        """Raises UnsupportedError if the reads of the iteration under way have a problem and its state is captured."""
        if problem is not None and self._captured:
            where = f"rank {self._host.rank}: iteration {self.engine.global_steps + 1}"
            raise UnsupportedError(f"{where} cannot be followed: {problem}{advice}")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            if self._host.rank == 0:
                say(line)

    def _stepping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._require_followed(_UNDONE if self._left else None, "")
        before = self.engine.global_steps
        self._reads.computing()
        if self.engine.is_gradient_accumulation_boundary():
            self._host.silent = before + 1 == self._guessed or before + 1 != self._begun
            if self._host.silent:
                self._say_once(_SILENT)
                self.begin()
            else:
                self._require_followed(self._reads.problem())
        outcome = original(*args, **kwargs)
        if self.engine.global_steps != before:
            self._updated = self.engine.global_steps
            self._host.pace = self._reads.updated(self._host.silent)
            self._drawn = None if self._tracked or self._host.silent else numbers_drawn()
            if self._host.silent:  # whatever comes next belongs to the next iteration
                self._end()
        return outcome

    # both

    def _loading(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._begun:
            self._end(ends=True)
            self._session.wait_for_capture()
            self._left = True
            return original(*args, **kwargs)
        self.engine.micro_steps = 0  # as at the start: DeepSpeed's checkpoints lack it
        self._host.schedule.begin_again()
        outcome = original(*args, **kwargs)
        self._loaded = self.engine.global_steps if outcome[0] is not None else None
        self._host.find_tensors(self._loaded is not None)
        self.resume()
        return outcome

    def _follow_end(self) -> None:
        """Treat destroy_process_group as the orderly end; without it, the end of the process is."""

        def destroy_process_group(original: Callable[..., Any], group: Any = None) -> Any:
            if group is None or group is torch.distributed.group.WORLD:
                if is_failing():  # in a `finally`: what is half done is no version, and the snapshots stay
                    leave, self._leave, self._updated = self._leave, _no_cleanup, None
                    leave(False)
                else:
                    self.shutdown()
            return original(group)

        replace(torch.distributed, "destroy_process_group", destroy_process_group)


def _no_cleanup(in_order: bool) -> None:
    """Does nothing: at the end of the job ft-run cleans up."""
