"""Small engines of real DeepSpeed in forked ranks, for tests of what stands between two updates; dropout, buffers on.

`run` trains one and reports everything that two runs must have in common to be called identical.
"""

import os

import torch
from torch import nn

from ft_plugins.adapters.deepspeed import prepare


class Ignoring:
    """Hooks that do nothing, but for `before_update`."""

    def __init__(self, host, around):
        self.host, self._around = host, around

    def before_update(self, step):
        self._around(self.host, step)

    def after_update(self, step): ...


def described(dtype):
    """Layers with everything that a forward may change or draw."""
    return [
        nn.Linear(6, 9, dtype=dtype), nn.BatchNorm1d(9, dtype=dtype), nn.Dropout(0.4),
        nn.Linear(9, 7, dtype=dtype), nn.Dropout(0.4), nn.Linear(7, 2, dtype=dtype),
    ]  # fmt: skip


class Batches:
    """Batches that are drawn as they are read, from the generator that dropout draws from, into the same memory."""

    def __init__(self, dtype):
        self._inputs, self._labels = torch.zeros(3, 6, dtype=dtype), torch.zeros(3, 2, dtype=dtype)
        self.read = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.read += 1
        return self._inputs.copy_(torch.rand(3, 6)), self._labels.copy_(torch.rand(3, 2))


def settings(stage, bf16, accumulate="", micro_batches=2, **zero):
    found = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": bf16}, "gradient_clipping": 0.5, "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.1}},
        "zero_optimization": {"stage": stage, **zero},
    }  # fmt: skip
    return found | ({"data_types": {"grad_accum_dtype": accumulate}} if accumulate else {})


def start(rank, world):
    """DeepSpeed, imported and initialised on this rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    prepare()
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    return deepspeed


def built(rank, world, pp, **told):
    """An engine: a pipeline of `pp` stages, without one where `pp` is 0."""
    deepspeed = start(rank, world)
    from deepspeed.pipe import PipelineModule

    config = settings(**told)
    layers = described(torch.bfloat16 if told["bf16"] else torch.float32)
    module = nn.Sequential(*layers)
    if pp:
        module = PipelineModule(
            layers, num_stages=pp, loss_fn=nn.functional.mse_loss, partition_method="uniform", seed_layers=False
        )
    parameters = list(module.parameters())
    engine = deepspeed.initialize(model=module, model_parameters=parameters, config=config)[0]
    torch.manual_seed(100 + rank)
    return engine


def train(engine, iterations, before=lambda step: None):
    """The losses. `before` is called before each iteration."""
    batches, losses = Batches(next(engine.module.parameters()).dtype), []
    for step in range(engine.global_steps + 1, iterations + 1):
        before(step)
        if hasattr(engine, "train_batch"):
            losses.append(float(engine.train_batch(batches)))
            continue
        while engine.global_steps < step:
            inputs, labels = next(batches)
            loss = nn.functional.mse_loss(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    return losses


def plain(values):
    """For a comparison that takes a NaN for a NaN, and -0.0 not for 0.0."""
    if isinstance(values, torch.Tensor):
        tensor = values.detach().contiguous()
        return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [plain(value) for value in values]
    return values.tobytes() if hasattr(values, "tobytes") else values


def report(host):
    """All that training goes on from."""
    parameters = {f"p {name}": one for name, one in host.engine.module.named_parameters()}
    return plain({"tensors": dict(host.tensors()), "parameters": parameters, "small": host.small_state()})


def run(rank, world, pp, told, around=lambda host, step: None, before=lambda host, step: None, iterations=4):
    """Train, with `around` called inside of each `before_update` and `before` before each iteration: losses, state."""
    engine = built(rank, world, pp, **told)
    from ft_plugins.adapters.deepspeed.core import DeepSpeedHost

    host = DeepSpeedHost(engine)
    host.keep_iterations()
    host.inventory()
    host.install(Ignoring(host, around))
    losses = train(engine, iterations, lambda step: before(host, step))
    return losses, report(host)
