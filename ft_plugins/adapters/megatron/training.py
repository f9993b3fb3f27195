"""Protect Megatron-LM's own training loop without an edit to the script: hooks at megatron.training level.

Invariant: an unprotected job runs Megatron-LM's original functions; a protected one calls them with unchanged
arguments. After a restore, and before the data loaders are built, every argument and object is as Megatron-LM's own
`load_checkpoint` leaves it; data position and RNG follow right before the first iteration. An iteration that Megatron
skips as a whole (`--iterations-to-skip`) reaches neither the optimizer nor `checkpoint_and_decide_exit`: its version
point is the moment before the next iteration, when the counters have moved.

    setup_model_and_optimizer     build host and session, restore          train_step         iteration_begin
    build_..._data_loaders        from the restored counters               dummy_train_step   a skipped iteration
    cyclic_iter                   draws as before the restore
    checkpoint_and_decide_exit    iteration_end, after it has saved        optimizer.step     wrapped by the core host
    pretrain                      orderly end

The identity of its data, for the fingerprint, is equal on all ranks and on every restart, different for other data:
each file's name, size and a digest of its first MiB, and the weights of a blend. Its size is bounded for any number of
data sets, because a segment's header holds it. A missing or empty file raises ConfigError there, before the data loader
fails on it. Options that a user may change between two starts (`--iterations-to-skip`, after a loss spike) are not part
of it.

In: `megatron.training.training` right after its import. Out: the same module with wrapped functions.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...config import launch_context
from ...errors import ConfigError, ResumeError, UnsupportedError
from ...model.topology import Topology
from ...session import Session, attach
from ..data.cycles import Cycles
from ..forward_edges import Saving
from ..scalar_writers import of_megatron
from ..script.script_hooks import replace_in_megatron as replace
from .arguments import require_followed, resolve
from .external_data import LACKED, ExternalData

_COUNTERS = ("iteration", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_HEAD_BYTES = 1 << 20
_DIGEST_LETTERS = 16  # 64 bits: enough without an adversary
_VALUE_BYTES = 64  # of JSON; longer values are replaced by their beginning and a digest
_DATA_BYTES = 512  # of JSON, for all data sets together
_ARGUMENTS = (
    *("seed", "micro_batch_size", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
    *("seq_length", "padded_vocab_size"),
    *("tokenizer_type", "split", "dataloader_type", "data_sharding", "mock_data", "data_parallel_random_init"),
    *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "calculate_per_token_loss"),
)


class TrainingHooks:
    """The wrapped functions of one process; `loop` is None until the model is built."""

    def __init__(self) -> None:
        self.loop: MegatronLoop | None = None

    def follow(self, module: ModuleType) -> None:
        """Wrap the functions of `module`. Raises UnsupportedError, naming one that it lacks."""
        replace(module, "setup_model_and_optimizer", functools.partial(self._building, module))
        replace(module, "build_train_valid_test_data_loaders", self._building_data)
        replace(module, "cyclic_iter", self._cycling)
        replace(module, "train_step", self._stepping)
        replace(module, "dummy_train_step", self._skipping)
        replace(module, "checkpoint_and_decide_exit", self._ending_iteration)
        replace(module, "pretrain", self._ending)

    def _building(self, module: ModuleType, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = module.get_args()
        require_followed(given, resolve(given, launch_context()).systems)
        built = original(*args, **kwargs)
        if self.loop is not None:
            raise UnsupportedError("setup_model_and_optimizer was called twice; build one model, or drop --reft")
        self.loop = MegatronLoop(module, *built)
        self.loop.resume()
        return built

    def _building_data(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.loop is None:
            return original(*args, **kwargs)
        with self.loop.counted_validation():
            built = original(*args, **kwargs)
        return self.loop.follow_data(built)

    def _cycling(self, original: Callable[..., Any], *args: Any) -> Any:
        return original(*args) if self.loop is None else self.loop.cycles.passes(original, *args)

    def _stepping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.loop is not None:
            self.loop.begin_iteration()
        outcome = original(*args, **kwargs)
        if self.loop is not None:
            self.loop.observe(outcome[0])
        return outcome

    def _skipping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.loop is None:
            return original(*args, **kwargs)
        self.loop.begin_iteration()
        outcome = original(*args, **kwargs)
        self.loop.skip_iteration()
        return outcome

    def _ending_iteration(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outcome = original(*args, **kwargs)
        if self.loop is not None:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            self.loop.end_iteration(given["iteration"], given["num_floating_point_operations_so_far"], bool(outcome))
        return outcome

    def _ending(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            outcome = original(*args, **kwargs)
        except SystemExit as stop:  # orderly with status 0, as by --exit-interval
            if not stop.code and self.loop is not None:
                self.loop.shutdown()
            raise
        if self.loop is not None:
            self.loop.shutdown()
        return outcome


class MegatronLoop:
    """The state of Megatron-LM's loop: host, session, and the counters that it keeps in local variables."""

    def __init__(self, module: ModuleType, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
        """Build host and session. A collective. Raises what `attach` raises."""
        from .core import MegatronCoreHost  # imports megatron.core, which must not be imported earlier

        self.args: argparse.Namespace = module.get_args()
        self.completed: int = self.args.iteration
        self.operations: Any = self.args.num_floating_point_operations_so_far
        self._skipped: int | None = None  # a skipped iteration whose version point is still to come
        self._restored = False  # by the session, not by Megatron's own load
        self._module = module
        self._begun = 0  # the iteration under way, or the last one; 0 before the first
        self._external = self._external_data()
        self.cycles = Cycles()
        self._host = MegatronCoreHost(
            chunks,
            optimizer,
            scheduler,
            topology=topology(self.args),
            completed=lambda: self.completed,
            counters=self._counters(),
            position=self._position(),
            identity=identity(self.args),
            consumed_samples=lambda: self.args.consumed_train_samples,
            arguments=self.args,
        )
        lacked = [self._host.checkpoint_lacks, *([LACKED] if self._external else [])]
        self._host.checkpoint_lacks = ", and ".join(filter(None, lacked))
        self._host.write_scalars = of_megatron(module)
        context = launch_context()
        self._session: Session = attach(self._host, resolve(self.args, context), context)
        if self._session.progress.written:
            Saving(self._session.progress.words).follow(module, ("save_checkpoint_and_time", "save_checkpoint"))

    def _external_data(self) -> ExternalData | None:
        if self.args.dataloader_type != "external":
            return None
        return ExternalData(torch.distributed.get_rank(), self.args.data_parallel_size, lambda: self._begun)

    def _position(self) -> dict[str, Any]:
        """Megatron's own data loaders are built from the counters, those of the script keep a position."""
        from .core import StateEntry

        one = self._external
        return {} if one is None else {"loaders": StateEntry(one.read, one.write)}

    def follow_data(self, built: Any) -> Any:
        """Data loaders for training, evaluation and test were built. Returns those to use. Raises UnsupportedError."""
        if self._external is None:
            return built
        train, valid, test = built
        iterations = getattr(self.args, "eval_iters", 0)
        evaluates = any(iterations) if isinstance(iterations, list) else bool(iterations)
        evaluates = evaluates or bool(getattr(self.args, "full_validation", False))
        return self._external.built(train, valid, evaluates), valid, test

    def _counters(self) -> dict[str, Any]:
        from .core import StateEntry

        def of_args(name: str) -> StateEntry:
            read = (lambda: self.completed) if name == "iteration" else (lambda: getattr(self.args, name))
            return StateEntry(read, functools.partial(setattr, self.args, name))

        operations = StateEntry(
            lambda: self.operations,
            functools.partial(setattr, self.args, "num_floating_point_operations_so_far"),
        )
        rerun = StateEntry(self._rerun_state, self._restore_rerun_state)
        entries = {name: of_args(name) for name in _COUNTERS if hasattr(self.args, name)}
        if self.args.dataloader_type == "cyclic" or getattr(self.args, "full_validation", False):
            entries["cycles"] = StateEntry(self.cycles.read, self.cycles.write)
        return {**entries, "num_floating_point_operations_so_far": operations, "rerun_state_machine": rerun}

    def _rerun_state(self) -> dict[str, Any]:
        """The state that the rerun state machine keeps between iterations; a rerun itself ends within one."""
        machine = self._module.get_rerun_state_machine()
        return {"large_value_counts": dict(machine.large_value_counts), "max_values": dict(machine.max_values)}

    def _restore_rerun_state(self, state: dict[str, Any]) -> None:
        machine = self._module.get_rerun_state_machine()
        machine.current_iteration = self.args.iteration
        machine.large_value_counts, machine.max_values = dict(state["large_value_counts"]), dict(state["max_values"])

    def resume(self) -> None:
        """Restore a version, or keep what Megatron's `--load` has loaded: see `recovery_plan.choose_source`."""
        loaded = self.args.iteration
        iteration = self._session.resume(loaded, self.args.train_iters or None)  # 0: evaluate only
        if iteration != self.args.iteration:
            raise ResumeError(
                f"rank {self._host.rank}: iteration {iteration} was restored, but Megatron's iteration counter is "
                f"{self.args.iteration}; start with --ftp-resume fresh"
            )
        self._restored = iteration != loaded
        self.completed = iteration
        self.operations = self.args.num_floating_point_operations_so_far
        if self._restored:
            self._drop_rerun()
            self._module.ft_integration.on_checkpoint_loaded(is_local_chkpt=True)

    def _drop_rerun(self) -> None:
        """Drop the rerun that a checkpoint of another iteration, which Megatron has loaded, may ask for."""
        machine = self._module.get_rerun_state_machine()
        machine.state = type(machine.state).NOT_RUNNING_YET
        machine.data_iterator_checkpoints = machine.failed_validation_call = machine.initial_result = None

    @contextmanager
    def counted_validation(self) -> Iterator[None]:
        """Keep a restored count of 0 consumed validation samples while data loaders are built.

        Megatron-LM takes 0 for 'not counted' and replaces it by what regular evaluations would have consumed, which is
        wrong if an evaluation fell on a skipped iteration. It does so only if `args.iteration` is not 0, which building
        loaders needs for nothing else without `--phase-transition-iterations` (0.16 and newer).
        """
        args, iteration = self.args, self.args.iteration
        transitions = getattr(args, "phase_transition_iterations", None)
        if self._restored and not args.consumed_valid_samples and not transitions:
            args.iteration = 0
        yield
        args.iteration = iteration

    def begin_iteration(self) -> None:
        """Called right before the forward of an iteration, or before the data of one is skipped."""
        self._end_skipped()
        self._begun = self.completed + 1
        self._session.iteration_begin(self._begun)

    def observe(self, losses: Mapping[str, Any]) -> None:
        """Report the loss of the iteration, which only the last stage has: the first of the loss function's values, or
        its ratio to the number of tokens."""
        for value in islice(losses.values(), 1):
            parts = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            if parts.device.type == "cpu" and parts.numel():
                flat = parts.detach().reshape(-1).double()
                self._session.ledger.computed(loss=float(flat[0] / flat[1] if flat.numel() == 2 else flat[0]))

    def skip_iteration(self) -> None:
        """Called after the data was skipped; nothing will be updated."""
        self._skipped = self.completed + 1
        self._host.skip_update(self._session)

    def end_iteration(self, iteration: int, operations: Any, exits: bool = False) -> None:
        """Called at the version point, after evaluation, logging and Megatron's own save. `exits`: Megatron has decided
        to exit here, on all ranks."""
        self.completed, self.operations = iteration, operations
        if self._external is not None:
            from megatron.core.num_microbatches_calculator import get_num_microbatches

            self._external.require_read(get_num_microbatches())
        self._session.iteration_end(iteration, exits)

    def _end_skipped(self) -> None:
        if self._skipped is not None:
            iteration, self._skipped = self._skipped, None
            self.end_iteration(iteration, self.operations)

    def shutdown(self) -> None:
        """Called at the orderly end of training."""
        self._end_skipped()
        self._session.shutdown()


def topology(args: argparse.Namespace) -> Topology:
    """The topology by which Megatron-LM lays ranks out for these arguments."""
    return Topology(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=args.data_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


# ---- identity of the data ----


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Seed, batch sizes, how samples are cut and drawn, and the files they come from. Raises ConfigError."""
    values = {name: bounded(getattr(args, name), _VALUE_BYTES) for name in _ARGUMENTS if hasattr(args, name)}
    named = list(blends(args))
    data = [describe(prefix) for prefixes, _ in named for prefix in prefixes]
    weights = [weights for _, weights in named]
    return {**values, "data": bounded(data, _DATA_BYTES), "data_weights": bounded(weights, _VALUE_BYTES)}


def blends(args: argparse.Namespace) -> Iterator[tuple[list[str], list[float] | None]]:
    """Data prefixes and weights, of all splits together or of each split, depending on Megatron's options."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    for named in (blend, *(per_split or ())):
        if named:
            prefixes, weights = named
            yield list(prefixes), None if weights is None else list(weights)


def bounded(value: Any, limit: int) -> Any:
    """`value` if its JSON has at most `limit` characters, else the beginning of the JSON and a digest of all of it."""
    text = json.dumps(value, default=str)
    if len(text) <= limit:
        return value
    count = [len(value)] if isinstance(value, list) else []
    return [*count, f"{text[: limit // 2]}...", _digest(text.encode())]


def describe(prefix: str) -> list[Any]:
    """`prefix` with name, size and digest of its `.bin` and `.idx`, or of the file `prefix`. Raises ConfigError."""
    if "://" in prefix:  # an object store, which is not read
        return [prefix]
    paths = [Path(prefix)] if Path(prefix).is_file() else [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    return [prefix, *(_file(path) for path in paths)]


def _file(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"data file {path} is missing; check --data-path (a prefix, without '.bin' or '.idx')")
    size = path.stat().st_size
    if size == 0:
        raise ConfigError(f"data file {path} is empty; create it again with tools/preprocess_data.py")
    with path.open("rb") as file:
        return [path.name, size, _digest(file.read(_HEAD_BYTES))]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_LETTERS]
