"""One rank of DeepSpeed that saves a checkpoint and has the same moment exported: prints how the two differ, by mode.

<folder>
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from ft_plugins.adapters.deepspeed import prepare

prepare()

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402

from ft_plugins.adapters.deepspeed.core import DeepSpeedHost  # noqa: E402
from ft_plugins.adapters.deepspeed.export import export  # noqa: E402
from ft_plugins.snapshot.capture import codec  # noqa: E402
from ft_plugins.snapshot.checkpoint.index import describe, parse  # noqa: E402

MODES = {
    "fp32 zero0": {"stage": 0, "bf16": False},
    "fp32 zero1": {"stage": 1, "bf16": False},
    "bf16 zero0": {"stage": 0},
    "bf16 zero0 accumulated in bf16": {"stage": 0, "accumulate": "bf16"},
    "bf16 zero1": {"stage": 1},
    "bf16 zero2": {"stage": 2},
    "bf16 zero2 frozen": {"stage": 2, "frozen": True},
    "bf16 zero3": {"stage": 3},
    "pipeline fp32 zero0": {"stage": 0, "bf16": False, "pipeline": True},
    "pipeline bf16 zero0": {"stage": 0, "pipeline": True},
    "pipeline bf16 zero1": {"stage": 1, "pipeline": True},
}


class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, batch):
        return super().forward(batch)


class Whole:
    """`CheckpointReader` of a job of one rank, from its live tensors."""

    def __init__(self, host, folder):
        self.folder = folder
        self.manifest = SimpleNamespace(iteration=host.engine.global_steps, world_size=1)
        told = describe(host.inventory(), 1, host.names())
        self._index = parse(json.loads(json.dumps(told)))
        self._tensors, self._small = host.tensors(), codec.decode(codec.encode(host.small_state()))

    chosen = (0,)

    def indices(self):
        return [self._index]

    def index(self, rank):
        return self._index

    def small(self, rank):
        return dict(self._small)

    def whole(self, name, ranks):
        tensor = self._tensors[name]
        return tensor.reshape(-1).view(torch.uint8).numpy().copy(), str(tensor.dtype).removeprefix("torch.")


def engine(stage, bf16=True, accumulate="", frozen=False, pipeline=False):
    torch.manual_seed(1)
    module = Model()
    if pipeline:
        layers = [LayerSpec(torch.nn.Linear, 5, 7), LayerSpec(torch.nn.LayerNorm, 7), LayerSpec(torch.nn.Linear, 7, 3)]
        module = PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    elif frozen:
        module[0].weight.requires_grad = False
    config = {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
    }  # fmt: skip
    config |= {"data_types": {"grad_accum_dtype": accumulate}} if accumulate else {}
    parameters = [one for one in module.parameters() if one.requires_grad]
    return deepspeed.initialize(model=module, model_parameters=parameters, config=config)[0]


def train(found):
    dtype = next(iter(found.module.parameters())).dtype
    for _ in range(3):
        batch = torch.rand(4, 5, dtype=dtype)
        if hasattr(found, "train_batch"):
            found.train_batch(iter([(batch, torch.rand(4, 3, dtype=dtype))]))
        else:
            found.backward(found(batch).float().pow(2).mean())
            found.step()


def differences(place, left, right):
    """Between two values of checkpoints; nothing for identical ones."""
    if type(left) is not type(right):
        return [f"{place}: {type(left).__name__} and {type(right).__name__}"]
    if isinstance(left, dict):
        found = [] if list(left) == list(right) else [f"{place}: keys {list(left)} and {list(right)}"]
        both = [key for key in left if key in right]
        return found + [line for key in both for line in differences(f"{place}/{key}", left[key], right[key])]
    if isinstance(left, list | tuple) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [line for number, (a, b) in pairs for line in differences(f"{place}[{number}]", a, b)]
    if isinstance(left, torch.Tensor):
        same = left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
        return [] if same else [f"{place}: {left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"]
    if type(left).__module__.startswith("deepspeed") and hasattr(left, "__dict__"):
        return differences(place, vars(left), vars(right))
    return [] if left == right else [f"{place}: {left!r} and {right!r}"]


def main(folder):
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    found = {}
    for mode, settings in MODES.items():
        one = engine(**settings)
        host = DeepSpeedHost(one)
        names = host.names()  # at the start, as a job is asked
        if "problem" in names:
            found[mode] = [names["problem"]]
            continue
        host.names = lambda names=names: names
        train(one)
        place = folder / mode.replace(" ", "-")
        one.save_checkpoint(str(place / "saved"))
        (place / "exported").mkdir()
        export(Whole(host, place), place / "exported" / "in")
        found[mode] = compared(place / "saved", place / "exported" / "in")
    print("FOUND", json.dumps(found))


def compared(saved, exported):
    def files(folder):
        return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.suffix in (".pt", "")}

    left, right = files(saved), files(exported)
    found = [] if set(left) == set(right) else [f"files {sorted(left)} and {sorted(right)}"]
    for name in set(left) & set(right):
        if left[name].suffix == ".pt":
            values = (torch.load(each[name], weights_only=False) for each in (left, right))
            found += differences(name, *values)
        elif left[name].is_file() and left[name].read_text() != right[name].read_text():
            found.append(f"{name} differs")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
