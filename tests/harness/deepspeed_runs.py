"""Runs of the DeepSpeed example. Golden and killed ones share the DeepSpeed configuration but its block `ft_plugins`,
of which the fork server gets the flags that ft-run would read there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from ft_plugins.config import Config

from .forkserver import JobSpec
from .runs import EXAMPLES, ExampleRun

ITERATIONS = 6
EXAMPLE = EXAMPLES / "deepspeed_gpt.py"
PRELOAD = (
    *("ft_plugins.adapters.deepspeed:prepare", "ft_plugins.adapters.deepspeed:install"),
    *(str(EXAMPLE), "ft_plugins.launcher.node_launch"),
)
_KERNELS = "harness.kernels:deepspeed_example"
_OPTIMIZERS: dict[str, dict[str, Any]] = {  # parameters by type in the configuration
    "AdamW": {"torch_adam": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Lion": {"betas": [0.9, 0.99]},
    "Lamb": {},
    "Adagrad": {},
}
_SKIPPING = {"initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}  # with ZeRO: 2 of the first 3 updates
_MODEL = ("--layers", "2", "--hidden", "32", "--sequence", "16")


def computes_in_fp16() -> bool:
    """Whether DeepSpeed accepts fp16 on this CPU."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@dataclass(frozen=True)
class DeepSpeedConfiguration:
    """Precision, ZeRO stage and parallel sizes of a job of `ranks`. `pp` 0: an engine without pipeline."""

    ranks: int
    stage: int
    bf16: bool = True
    accumulate: str = ""  # dtype of gradient accumulation; '': DeepSpeed's default
    pp: int = 0
    tp: int = 1
    axes: str = "pipe-data-model"
    clipping: float = 1.0
    batch: int = 0  # global; 0: one that the ranks divide
    checked: bool = False  # bf16 with ZeRO: skip an update whose gradients overflow
    optimizer: str = "AdamW"  # the type in the configuration
    offload: str = ""  # optimizer state in host memory: updated by 'torch', or by DeepSpeed's 'own', which it compiles
    ratio: float = 1.0  # of the optimizer's state that is offloaded
    offload_param: bool = False  # the parameters too
    fp16: bool = False
    untested: bool = False  # DeepSpeed accepts any optimizer with ZeRO
    sub_group_size: int = 1_000_000_000  # elements that ZeRO-3 updates at once

    def __str__(self) -> str:
        precision = "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"
        words = [precision, f"zero{self.stage}", f"pp{self.pp}" if self.pp else "plain"]
        words += [f"accumulate-{self.accumulate}"] if self.accumulate else []
        words += [] if self.clipping else ["unclipped"]
        words += [f"tp{self.tp}"] if self.tp > 1 else []
        words += [self.optimizer.lower()] if self.optimizer != "AdamW" else []
        words += ["offload"] if self.offload else []
        words += ["own"] if self.offload == "own" else []
        words += ["parameters"] if self.offload_param else []
        return "-".join([*words, f"{self.ranks}ranks"])

    def json(self) -> dict[str, Any]:
        """DeepSpeed's configuration without the block of ft_plugins."""
        own = {key: value for key, value in _OPTIMIZERS[self.optimizer].items() if self.offload != "own"}
        parameters = {"lr": 1e-3, "weight_decay": 0.1, **own}
        config: dict[str, Any] = {
            "train_batch_size": self.batch or (8 if 8 % self.ranks == 0 else 4 * self.ranks),
            "train_micro_batch_size_per_gpu": 1 if self.ranks == 4 and not self.pp else 2,
            "optimizer": {"type": self.optimizer, "params": parameters},
            "zero_allow_untested_optimizer": self.untested or self.optimizer in ("SGD", "Lamb"),
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-3}},
            "gradient_clipping": self.clipping,
            "fp16": {"enabled": self.fp16, **_SKIPPING},
            "bf16": {"enabled": self.bf16 and not self.fp16, **({"check_grad_overflow": True} if self.checked else {})},
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 100,
                "sub_group_size": self.sub_group_size,
            },
            "steps_per_print": 1000,
        }
        if self.offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": self.ratio}
            config["zero_force_ds_cpu_optimizer"] = self.offload == "own"
        if self.offload_param:
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        return config | ({"data_types": {"grad_accum_dtype": self.accumulate}} if self.accumulate else {})

    def argv(self) -> list[str]:
        """The example's flags."""
        words = ["--pp", str(self.pp), "--tp", str(self.tp), *_MODEL, "--axes", self.axes]
        return [*words, "--eval-at", "2"] if self.pp else words


def with_a_device(argv: Sequence[str]) -> None:
    """One rank of the DeepSpeed example, which takes memory of this CPU by another name for that of a device, and lets
    torch's AdamW update a part in host memory in place of DeepSpeed's own, which takes minutes to compile."""
    import_module("deepspeed.accelerator").get_accelerator()._name = "cpu:0"
    vars(import_module("deepspeed.runtime.zero.stage3"))["DeepSpeedCPUAdam"] = import_module("torch").optim.AdamW
    import_module("deepspeed_gpt").main(argv)


@dataclass(frozen=True)
class DeepSpeedRun(ExampleRun):
    """A run of a configuration, which is written to its folder. `block`: of ft_plugins; {}: none."""

    framework = "deepspeed"

    configuration: DeepSpeedConfiguration
    block: dict[str, Any] = field(default_factory=dict)
    seed: int = 1234
    iterations: int = ITERATIONS
    script: str = ""  # if it is not the example
    words: tuple[str, ...] = ()  # further arguments of `script`

    @property
    def ranks(self) -> int:
        return self.configuration.ranks

    def armed(self, faults: str) -> DeepSpeedRun:
        return replace(self, block={**self.block, "faults": faults}) if faults else self

    def spec(self, **fields: object) -> JobSpec:
        self.folder.mkdir(parents=True, exist_ok=True)
        written = self.folder / "ds.json"
        block = {"ft_plugins": self.block} if self.block else {}
        written.write_text(json.dumps({**self.configuration.json(), **block}))
        words = [*self.configuration.argv(), "--seed", str(self.seed), "--iterations", str(self.iterations)]
        words += ["--deepspeed_config", str(written), *self.words]
        own = f"{EXAMPLE}:main" if self.configuration.optimizer not in ("Lion", "Lamb") else _KERNELS
        return self.job(self.script or own, words, Config.from_json(self.block).flags(), fields)
