"""Hugging Face's Trainer on real text, as one writes it without ft_plugins: nothing in this script protects it.

    ft-run --nproc-per-node 2 launch/examples/hf_trainer.py --reft
    ft-run --nproc-per-node 2 launch/examples/hf_trainer.py --deepspeed ds.json
    torchrun --nproc-per-node 2 launch/examples/hf_trainer.py                      (plain, with identical numbers)

The second line needs `"ft_plugins": {"reft": {}}` in ds.json. A Llama of two layers predicts the next byte.
"""

from __future__ import annotations

import argparse

import torch
from byte_text import VOCABULARY, Text
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SEED = 1234


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text, which follow one another."""

    def __init__(self, text: Text, count: int, sequence: int) -> None:
        self._text, self._count, self._sequence = text.content, count, sequence

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.from_numpy(self._text[index * self._sequence :][: self._sequence].copy()).long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", help="DeepSpeed's configuration")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of an update")
    parser.add_argument("--sequence", type=int, default=32)
    given = parser.parse_args()
    on_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir="build/hf_trainer",
        deepspeed=given.deepspeed,
        max_steps=given.iterations,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=given.accumulate,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=SEED,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
    )
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=given.sequence, attention_dropout=0.1,
    )  # fmt: skip
    text = Text.read(None)
    train, valid = text.split(0.1, given.sequence)
    Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Windows(train, 96, given.sequence),
        eval_dataset=Windows(valid, 16, given.sequence),
    ).train()


if __name__ == "__main__":
    main()
