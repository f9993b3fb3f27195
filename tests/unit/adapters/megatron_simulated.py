"""Local SGD on a Megatron job, simulated: the ranks of one replica train all replicas, one after another.

The reference has no session, and reads nothing of a host. It walks Megatron's own optimizers, so a model chunk that the
host leaves out is not left out here. Between two iterations of different replicas it exchanges the random generators.
What a synchronisation does is in `local_sgd_reference`;
and from DreamDDP, with average first: some modules in each iteration, x <- mean(x) - lr g, where all replicas' x are
those before the iteration. In an iteration after whose update all modules are synchronised there is nothing else.

Sums of squares are exact here and in another order in the product: weights and factors may differ in the last bit of
float64.
"""

import math
from contextlib import ExitStack
from typing import NamedTuple
from unittest.mock import patch

import gpt_job
import numpy as np
import torch
import torch.distributed as dist
from local_sgd_reference import Reference, mean_of
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron_gangs import gang_job

from ft_plugins.adapters.megatron.replay import restore_rng, rng_state

Values = dict[str, np.ndarray]


class Part(NamedTuple):
    """What a rank updates of a parameter, flat and live. `counts`: whether norms include this copy of it."""

    values: torch.Tensor
    module: str
    counts: bool


def parts(job):
    """By chunk and name."""
    found = {}
    for parameter, values in _updated(job):
        index, name = next(
            (index, name)
            for index, chunk in enumerate(job.chunks)
            for name, one in chunk.named_parameters()
            if one is parameter
        )
        counts = not getattr(parameter, "shared", False) and param_is_not_tensor_parallel_duplicate(parameter)
        module = _module(job.chunks[index], name, parameter)
        found[f"chunk{index}.{name}"] = Part(values.detach().view(-1), module, counts)
    return found


def _updated(job):
    """Each parameter of the model with what the optimizer updates: itself, its fp32 master, or a shard of that."""
    for one in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        if hasattr(one, "shard_fp32_groups"):
            groups = (
                (one.model_float16_groups, one.shard_fp32_from_float16_groups),
                (
                    one.model_fp32_groups,
                    one.shard_fp32_groups,
                ),
            )
        elif hasattr(one, "float16_groups"):
            groups = (one.float16_groups, one.fp32_from_float16_groups), (one.fp32_from_fp32_groups,) * 2
        else:
            groups = (([group["params"] for group in one.optimizer.param_groups],) * 2,)
        for models, mains in groups:
            for model, main in zip(models, mains, strict=True):
                yield from zip(model, main, strict=True)


def _module(chunk, name, parameter):
    """Layers by Megatron's number; a tied output layer is a copy of the embedding."""
    for path, module in chunk.named_modules():
        if path and name.startswith(f"{path}.") and hasattr(module, "layer_number"):
            return f"layer {module.layer_number}"
    return "embedding" if "embedding." in name or getattr(parameter, "shared_embedding", False) else "head"


def copied(job):
    """What this rank updates, as it is now."""
    return {name: part.values.numpy().copy() for name, part in parts(job).items()}


def whole(job):
    """The parameters of the model on this rank."""
    with job.gathered():
        return {
            f"chunk{index}.{name}": parameter.detach().float().numpy().copy()
            for index, chunk in enumerate(job.chunks)
            for name, parameter in chunk.named_parameters()
        }


def _values(job):
    return {name: part.values for name, part in parts(job).items()}


class Simulated:
    """This rank's part of two replicas. `sync`: the keys of the policy; `members`: data-parallel ranks of a replica;
    `turns`: the modules that DreamDDP averages in each iteration of a period."""

    def __init__(self, rank, world, flags, sync, members, turns=(), **more):
        self._sync, self._world, self._open = sync, world, ExitStack()
        self.jobs = [self._open.enter_context(gang_job(rank, world, *flags, **more))]
        with (
            patch.object(parallel_state, "initialize_model_parallel", lambda *given, **keys: None),
            patch.object(gpt_job, "init_num_microbatches_calculator", lambda *given: None),
        ):
            self.jobs.append(self._open.enter_context(gang_job(rank, world, *flags, **more)))
        place = parallel_state.get_data_parallel_rank()
        for replica, job in enumerate(self.jobs):
            for sampler in filter(None, job.train):
                sampler._replica, sampler._replicas = replica * members + place, 2 * members
            if turns or sync["apply"] == "update":
                job.optimizer.step = self._late(job, job.optimizer.step)
        self._generators = [rng_state() for _ in self.jobs]
        modules = {name: part.module for name, part in parts(self.jobs[0]).items()}
        self._reference = Reference(sync, _values(self.jobs[0]), modules, self._norms)
        self._pending = set()
        self._turns, self._averages = turns, False  # whether any rank averages in this iteration
        self._means = {}

    def _late(self, job, step):
        def update():
            if self._turns and self._averages:
                self._put(job, self._means)
            elif not self._turns:
                self._write(job)
            return step()

        return update

    def run(self, steps):
        """By replica: gradient norms, values after each iteration and parameters at the end; what was left out and
        clipped."""
        found = [{"norms": [], "after": [], "left_out": [], "clipped": []} for _ in self.jobs]
        apply = self._sync.get("apply", "wait")
        for step in range(1, steps + 1):
            self._turn(step)
            for replica, job in enumerate(self.jobs):
                restore_rng(self._generators[replica])
                if apply == "forward":
                    self._write(job)
                found[replica]["norms"].append(job.train_step(skip=lambda: None)["grad_norm"])
                self._generators[replica] = rng_state()
            if step % self._sync["tau"] == 0:
                left_out, clipped = self._reference.combine([_values(job) for job in self.jobs])
                self._pending = set(range(len(self.jobs)))
                for one in found:
                    one["left_out"].append(left_out)
                    one["clipped"].append(clipped)
            for replica, job in enumerate(self.jobs):
                if apply == "wait":
                    self._write(job)
                found[replica]["after"].append(copied(job))
        for replica, job in enumerate(self.jobs):
            self._write(job)
            found[replica]["end"] = whole(job)
        self._open.close()
        return found

    @torch.no_grad()
    def _turn(self, step):
        """Take the means of this iteration, before any replica changes."""
        if not self._turns:
            return
        due = self._turns[(step - 1) % len(self._turns)] if step % self._sync["tau"] else set()
        one, other = (parts(job) for job in self.jobs)
        self._averages = bool(due)
        due_parts = {name: part.values for name, part in one.items() if part.module in due}
        self._means = {name: mean_of([values, other[name].values]) for name, values in due_parts.items()}

    def _norms(self, changes):
        """By module, over all ranks."""
        own = {}
        for name, part in parts(self.jobs[0]).items():
            if name in changes and part.counts:
                own.setdefault(part.module, []).append(float(changes[name].square().sum()))
        rows = [None] * self._world
        dist.all_gather_object(rows, own)
        names = {name for row in rows for name in row}
        return {name: math.sqrt(math.fsum(one for row in rows for one in row.get(name, ()))) for name in names}

    @torch.no_grad()
    def _write(self, job):
        """The anchors become this replica's parameters, if a synchronisation is still to be applied."""
        replica = self.jobs.index(job)
        if replica not in self._pending:
            return
        self._pending.remove(replica)
        self._put(job, self._reference.anchors)

    @torch.no_grad()
    def _put(self, job, values):
        """Write parameters of this replica, and what forwards read of them."""
        for name, part in parts(job).items():
            if name in values:
                part.values.copy_(values[name])
        for one in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
            if hasattr(one, "_copy_main_params_to_model_params"):
                one._copy_main_params_to_model_params()
        if job.args.distributed_optimizer:
            for chunk in job.chunks:
                chunk.start_param_sync(force_sync=True)
