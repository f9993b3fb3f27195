"""Say before a job what of it is followed, refused or without effect. Nothing is started, and no device is needed.

Invariant: what is said comes from the same rules that the job asks when it starts. What only a model, an optimizer or a
data set shows is not known here.

In: a job's own arguments or DeepSpeed configuration, the systems that are on. Out: `JobCheck`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rules import DEEPSPEED, MEGATRON, Finding, Treatment, findings, line
from .rules.deepspeed import OTHERWISE as WITHOUT_THE_BLOCK
from .rules.megatron import OTHERWISE as WITHOUT_PROTECTION
from .rules.megatron import layer_wise
from .rules.rule import at

_ADAM = ("fp32 master or parameter, and two fp32 moments", 12.0)
_MOMENTS = {  # by optimizer, in small letters: bytes of each parameter
    "adam": _ADAM,
    "adamw": _ADAM,
    "sgd": ("fp32 master or parameter, and fp32 momentum", 8.0),
}


@dataclass(frozen=True)
class ModelSize:
    """What a plan of memory needs; `parameters` None: unknown before the job. `sharded`: data parallelism shards the
    optimizer's state. `each`: bytes of a parameter that are captured, and what they are; None: unknown."""

    parameters: float | None
    each: tuple[str, float] | None
    tp: int
    pp: int
    ranks: int
    sharded: bool


@dataclass(frozen=True)
class JobCheck:
    """What is known before the job. `refusal`: the line with which it would end at its start, '' if it would not."""

    framework: str
    found: tuple[Finding, ...]
    refusal: str
    notes: tuple[str, ...]
    size: ModelSize

    def treated(self, treatment: Treatment) -> tuple[str, ...]:
        """The phrases of what is treated so."""
        return tuple(one.text for one in self.found if one.rule.treatment is treatment)

    def block(self) -> dict[str, Any]:
        """The check, for programs."""
        treated = {one.value: list(self.treated(one)) for one in Treatment}
        return {"framework": self.framework, **treated, "refusal": self.refusal, "notes": list(self.notes)}

    def lines(self) -> Iterator[str]:
        """The check, for people."""
        yield self.framework
        for treatment in Treatment:
            for text in self.treated(treatment):
                yield f"  {treatment.value:<12}{text}"
        for note in self.notes:
            yield f"  note        {note}"


def check_megatron(folder: Path, words: Sequence[str], systems: Sequence[str], ranks: int) -> JobCheck:
    """Check a script of Megatron-LM in `folder` with these arguments. Raises FtError if it cannot be read."""
    from .megatron.reading import read_arguments  # imports torch

    read = read_arguments(folder, words, ranks)
    found = findings(MEGATRON, read.values, systems=systems)
    notes = [f"Megatron-LM's own validation, on this machine: {read.problem}"] if read.problem else []
    if read.unknown:
        notes.append(f"not arguments of Megatron-LM, so the script's own or misspelt: {', '.join(read.unknown)}")
    if read.ranks > ranks:
        notes.append(
            f"taken for {read.ranks} ranks, the fewest of these parallel sizes; put ft-run's own arguments first"
        )
    values = read.values
    if values.pipeline_model_parallel_size > 1 and read.parameters is not None:
        notes.append(
            "parameters are counted as if all stages held as many as the largest of "
            f"{values.pipeline_model_parallel_size} stages: give --parameters if embeddings are a large part"
        )
    usual = not at(values, "use_precision_aware_optimizer")  # which keeps masters and moments in many forms
    each = _MOMENTS.get(str(at(values, "optimizer")).lower()) if usual else None
    size = ModelSize(
        read.parameters, each, values.tensor_model_parallel_size,
        values.pipeline_model_parallel_size, read.ranks,
        bool(values.use_distributed_optimizer or at(values, "use_torch_fsdp2") or layer_wise(values)),
    )  # fmt: skip
    name = f"Megatron-LM {read.version}"
    return JobCheck(name, found, line(found, WITHOUT_PROTECTION), tuple(notes), size)


def check_deepspeed(settings: Mapping[str, Any], systems: Sequence[str], ranks: int) -> JobCheck:
    """Check a DeepSpeed configuration."""
    found = findings(DEEPSPEED, settings, systems=systems)
    kind = at(settings, "optimizer.type")
    notes = [] if kind else ["the configuration names no optimizer: the script's own is looked at when the job starts"]
    stage = at(settings, "zero_optimization.stage") or 0
    size = ModelSize(None, _MOMENTS.get(str(kind or "adam").lower()), 1, 1, ranks, bool(stage))
    return JobCheck("DeepSpeed", found, line(found, WITHOUT_THE_BLOCK), tuple(notes), size)
