"""A script with Hugging Face's Trainer, as a user writes it, and nothing of this project in its training.

    ft-run --nproc-per-node 2 trainer_jobs.py PREFIX --accumulate 2 --evaluate 3 --reft
    torchrun --nproc-per-node 2 trainer_jobs.py PREFIX --deepspeed ds.json

What it ends with is written to PREFIX and the rank: digests of parameters, optimizer, scheduler, TrainerState,
callbacks, generators, and of every batch. It kills itself with `--kill RESTART:RANK:STEP:WHEN`.
"""

import argparse
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from ft_plugins.model.digest import readable

TIMES = ("_runtime", "_per_second", "_time")


class Tokens(torch.utils.data.Dataset):
    """Samples that are augmented with random numbers of the process."""

    def __init__(self, size, augmented):
        self.size, self.augmented, self.read, self.shift = size, augmented, 0, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:  # of a data set that is iterated
            raise IndexError(index)
        tokens = torch.randint(0, 64, (8 + 4 * (index % 2),), generator=torch.Generator().manual_seed(index))
        tokens = (tokens + self.shift) % 64
        if self.augmented:
            tokens[random.randrange(8)] = int(torch.randint(0, 64, ()))
        self.read += 1
        return {"input_ids": tokens, "labels": tokens}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for index in range(self.size):
            tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
            yield {"input_ids": tokens, "labels": tokens}


class Counting(TrainerCallback):
    """A user's callback, with state that nothing exports."""

    def __init__(self):
        self.steps, self.losses, self.epochs = 0, [], 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def on_epoch_end(self, args, state, control, **kwargs):
        self.epochs += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses.append(float((logs or {}).get("loss", 0.0)))


class Adjusting(TrainerCallback):
    """Changes arguments, parameter groups, the scheduler and the data when training and epochs begin."""

    def on_train_begin(self, args, state, control, **kwargs):
        args.max_grad_norm /= 2
        kwargs["lr_scheduler"].base_lrs = [rate * 0.9 for rate in kwargs["lr_scheduler"].base_lrs]

    def on_epoch_begin(self, args, state, control, **kwargs):
        kwargs["train_dataloader"].base_dataloader.dataset.shift += 1
        for group in kwargs["optimizer"].param_groups:
            group["weight_decay"] += 0.01


class Paced:
    """An object of a model, which counts; no snapshot has it."""

    def __init__(self):
        self.step = 0


class Strange(TrainerCallback):
    """What nothing asks a script not to do. `of` a model: it changes a dropout once, in `exact`; halves the parameters
    when training begins, in `halved`."""

    def __init__(self, way):
        self.way = way

    def on_train_begin(self, args, state, control, **kwargs):
        if self.way == "halved":
            with torch.no_grad():
                for one in kwargs["model"].parameters():
                    one.mul_(0.5)

    def on_step_end(self, args, state, control, **kwargs):
        if self.way == "exact" and state.global_step == 4:
            kwargs["model"].model.layers[1].self_attn.attention_dropout = 0.3


def make_strange(model, way):
    model.seen, model.noise = [0, 1.0], {"loss": [torch.Generator().manual_seed(3)]}
    if way == "object":
        model.paced = Paced()


def strange_factor(trainer, model, loss):
    """Of a loss, by what the model and the Trainer keep."""
    inner = getattr(model, "module", model)
    counting = getattr(inner, "paced", None)
    if counting is not None:
        counting.step += 1
    inner.seen[0] += 1
    inner.seen[1] *= 0.9
    mean = getattr(trainer, "mean", torch.zeros(()))
    trainer.mean = 0.5 * mean + 0.5 * loss.detach().mean()
    drawn = torch.rand(1, generator=inner.noise["loss"][0]).item()
    return 1.0 + inner.seen[1] + 0.01 * inner.seen[0] + 0.1 * drawn + 0.1 * trainer.mean.item()


class Killed(TrainerCallback):
    def __init__(self, kills):
        restart, rank = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), int(os.environ["RANK"])
        parts = [one.split(":") for one in kills]
        self._when = {(int(step), when) for r, k, step, when in parts if (int(r), int(k)) == (restart, rank)}
        save = TrainerState.save_to_json  # what a Trainer saves last

        def saving(state, path):
            self._die(state.global_step, "saving")
            save(state, path)

        TrainerState.save_to_json = saving

    def _die(self, step, when):
        if (step, when) in self._when:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_substep_end(self, args, state, control, **kwargs):
        self._die(state.global_step + 1, "substep")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._die(state.global_step + 1, "update")

    def on_step_end(self, args, state, control, **kwargs):
        self._die(state.global_step, "end")

    def on_evaluate(self, args, state, control, **kwargs):
        self._die(state.global_step, "evaluate")

    def on_save(self, args, state, control, **kwargs):
        self._die(state.global_step, "saved")

    def on_train_end(self, args, state, control, **kwargs):
        self._die(state.global_step, "after")


def allow_fsdp_on_a_cpu():
    """accelerate shards with FSDP2 on devices only; torch does on a CPU too."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def initialise(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = initialise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("prefix", type=Path)
    parser.add_argument("--deepspeed")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--evaluate", type=int, default=0)
    parser.add_argument("--patience", type=int, default=0)
    parser.add_argument("--checkpoint", type=int, default=0)
    parser.add_argument("--worst", action="store_true", help="load the first checkpoint at the end, as the best one")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--strategy", default="random")
    parser.add_argument("--augmented", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--adjust", action="store_true")
    parser.add_argument("--strange", choices=("", "exact", "object", "halved"), default="")
    parser.add_argument("--kill", action="append", default=[])
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    if given.fsdp:
        allow_fsdp_on_a_cpu()
    folder = Path(f"{given.prefix}checkpoints")
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=given.deepspeed,
        fsdp=given.fsdp or None,
        fsdp_config={"version": 2} if given.fsdp else None,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=given.accumulate,
        max_steps=given.steps,
        learning_rate=1e-2,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        logging_steps=given.every,
        eval_strategy="steps" if given.evaluate else "no",
        eval_steps=given.evaluate or None,
        save_strategy="steps" if given.checkpoint else "no",
        save_steps=given.checkpoint or 500,
        metric_for_best_model="loss" if given.evaluate else None,
        greater_is_better=given.worst or None,
        load_best_model_at_end=bool(given.evaluate and given.checkpoint),
        train_sampling_strategy=given.strategy,
        dataloader_num_workers=given.workers,
        use_cpu=True,
        ddp_backend="gloo",
        seed=7,
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=16, attention_dropout=0.1, **sizes)
    )

    def collate(samples):
        longest = max(len(one["input_ids"]) for one in samples)
        padded = [torch.nn.functional.pad(one["input_ids"], (0, longest - len(one["input_ids"]))) for one in samples]
        return {"input_ids": torch.stack(padded), "labels": torch.stack(padded)}

    class Recording(Trainer):
        """A user's subclass, with a sum of its own."""

        tokens = 0

        def training_step(self, model, inputs, *args, **kwargs):
            self.tokens += int(inputs["input_ids"].numel())
            self.seen = [*getattr(self, "seen", []), [self.state.global_step, readable(inputs["input_ids"])["xxh3"]]]
            return super().training_step(model, inputs, *args, **kwargs)

        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * strange_factor(self, model, loss) if given.strange and model.training else loss

    counting = Counting()
    callbacks = [counting, Killed(given.kill)]
    if given.adjust:
        callbacks.append(Adjusting())
    if given.strange:
        make_strange(model, given.strange)
        callbacks.append(Strange(given.strange))
    if given.patience:
        callbacks.append(EarlyStoppingCallback(given.patience))
    data = Stream(given.samples) if given.stream else Tokens(given.samples, given.augmented)
    trainer = Recording(
        model=model, args=arguments, train_dataset=data, eval_dataset=Tokens(6, False), data_collator=collate,
        callbacks=callbacks,
    )  # fmt: skip
    saved = folder.is_dir() and any(folder.iterdir())
    outcome = trainer.train(resume_from_checkpoint=True if given.resume and saved else None)
    write(given.prefix, rank, trainer, outcome, counting, callbacks)


def write(prefix, rank, trainer, outcome, counting, callbacks):
    optimizer = trainer.optimizer
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    engine = getattr(trainer, "deepspeed", None)
    logged = trainer.state.log_history
    history = [{key: one for key, one in entry.items() if not key.endswith(TIMES)} for entry in logged]
    fields = {name: value for name, value in vars(trainer.state).items() if name != "log_history"}
    fields["best_model_checkpoint"] = str(fields["best_model_checkpoint"]).rpartition("/")[2]
    for part in trainer.model.modules():
        if isinstance(part, FSDPModule):  # an evaluation leaves parameters gathered
            part.reshard()
    local = {name: getattr(one, "_local_tensor", one) for name, one in trainer.model.named_parameters()}
    state = {
        "parameters": {name: getattr(one, "ds_tensor", one).detach() for name, one in local.items()},
        "optimizer": [
            {key: getattr(value, "_local_tensor", value) for key, value in one.items()}
            for one in optimizer.state.values()
        ],
        "groups": [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups],
        "scheduler": trainer.lr_scheduler.state_dict(),
        "engine": None if engine is None else [engine.global_steps, engine.skipped_steps, engine.micro_steps],
        "state": fields,
        "history": history,
        "loss": outcome.training_loss,
        "counting": vars(counting),
        "patience": [getattr(one, "early_stopping_patience_counter", None) for one in callbacks],
        "tokens": trainer.tokens,
        "batches": trainer.seen,
        "rng": [torch.get_rng_state(), list(random.getstate()[1]), np.random.get_state()[1]],
    }
    Path(f"{prefix}{rank}").write_text(json.dumps(readable(state)))


if __name__ == "__main__":
    main()
