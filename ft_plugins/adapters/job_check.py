"""Say before a job what of it is followed, refused or without effect. Nothing is started, and no device is needed.

Invariant: what is said comes from the same rules that the job asks when it starts, and arguments mean what the
framework's own parser says. What only a model, an optimizer, a data set or the script shows is not known here.

In: a job's own arguments or DeepSpeed configuration, the systems that are on. Out: `JobCheck`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import FtError
from .rules import DEEPSPEED, HUGGING_FACE, MEGATRON, Finding, Treatment, findings, line
from .rules.deepspeed import OTHERWISE as WITHOUT_THE_BLOCK
from .rules.hugging_face import OTHERWISE as WITHOUT_THE_FLAG
from .rules.hugging_face import PERSISTENT
from .rules.megatron import OF_TRANSFORMER_ENGINE, layer_wise
from .rules.megatron import OTHERWISE as WITHOUT_PROTECTION
from .rules.megatron_forks import GPT_NEOX, NEOX
from .rules.megatron_forks import OTHERWISE as WITHOUT_THE_LOOP
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
    """What is known before the job. `refusal`: the line with which it would end at its start, '' if it would not.
    `rejected`: why the framework's own validation ends it, protected or not; '' if it does not."""

    framework: str
    found: tuple[Finding, ...]
    refusal: str
    notes: tuple[str, ...]
    size: ModelSize
    rejected: str = ""

    def treated(self, treatment: Treatment) -> tuple[str, ...]:
        """The phrases of what is treated so."""
        return tuple(one.text for one in self.found if one.rule.treatment is treatment)

    def block(self) -> dict[str, Any]:
        """The check, for programs."""
        treated = {one.value: list(self.treated(one)) for one in Treatment}
        said = {"refusal": self.refusal, "rejected": self.rejected, "notes": list(self.notes)}
        return {"framework": self.framework, **treated, **said}

    def lines(self) -> Iterator[str]:
        """The check, for people."""
        yield self.framework
        for treatment in Treatment:
            for text in self.treated(treatment):
                yield f"  {treatment.value:<12}{text}"
        for note in self.notes:
            yield f"  note        {note}"


def check_megatron(folder: Path, words: Sequence[str], systems: Sequence[str], ranks: int) -> JobCheck:
    """Check a script of Megatron-LM in `folder` with these arguments. Raises FtError if they cannot be read."""
    from .megatron.arguments import read_arguments  # imports torch

    read = read_arguments(folder, words, ranks)
    lacking = () if find_spec("transformer_engine") else OF_TRANSFORMER_ENGINE
    found = findings((*MEGATRON, *lacking), read.values, systems=systems)
    notes = _unknown("Megatron-LM", read.unknown)
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
    rejected = read.problem and f"Megatron-LM's own validation refuses it on this machine: {read.problem}"
    name = f"Megatron-LM {read.version}"
    return JobCheck(name, found, line(found, WITHOUT_PROTECTION), tuple(notes), size, rejected)


def check_deepspeed(settings: Mapping[str, Any], systems: Sequence[str], ranks: int, client: str = "") -> JobCheck:
    """Check a DeepSpeed configuration. `client`: the program whose loop trains the engine, if not the script's own."""
    found = findings(DEEPSPEED, settings, {"built": {"client": client}}, systems=systems)
    of_its_loop = findings(GPT_NEOX, settings) if client == NEOX else ()
    kind = at(settings, "optimizer.type")
    notes = [] if kind else ["the configuration names no optimizer: the script's own is looked at when the job starts"]
    stage = at(settings, "zero_optimization.stage") or 0
    size = ModelSize(None, _MOMENTS.get(str(kind or "adam").lower()), 1, 1, ranks, bool(stage))
    refusal = line(found, WITHOUT_THE_BLOCK) or line(of_its_loop, WITHOUT_THE_LOOP)  # in the order of the job
    return JobCheck("DeepSpeed", (*found, *of_its_loop), refusal, tuple(notes), size)


def check_trainer(words: Sequence[str], systems: Sequence[str], ranks: int, engine: JobCheck | None) -> JobCheck:
    """Check the arguments of a script with Hugging Face's Trainer; `engine`: the check of its DeepSpeed configuration.
    Raises FtError if they cannot be read."""
    with quiet() as said:
        try:
            transformers = importlib.import_module("transformers")
            parser = transformers.HfArgumentParser(transformers.TrainingArguments, allow_abbrev=False)
            values, rest = parser.parse_known_args(list(words))
        except ImportError as error:
            raise FtError(f"transformers cannot be imported ({error}): run this where the job runs") from error
        except SystemExit as stop:
            told = last_line(said.getvalue())
            raise FtError(f"the parser of TrainingArguments refuses these arguments: {told}") from stop
    found = findings((PERSISTENT, *HUGGING_FACE), values, {"built": {"trainer": engine is None}}, systems=systems)
    notes = _unknown("TrainingArguments", [word for word in rest if word.startswith("--")])
    notes.append("TrainingArguments that the script sets itself, and its model and data, are looked at when it starts")
    name, refusal = f"Hugging Face's Trainer (transformers {transformers.__version__})", line(found, WITHOUT_THE_FLAG)
    if engine is not None:
        notes = [*engine.notes, *notes]
        name, found, refusal = f"{name} over DeepSpeed", (*engine.found, *found), engine.refusal or refusal
        return JobCheck(name, found, refusal, tuple(notes), engine.size)
    moments = _MOMENTS.get(str(values.optim).lower().removesuffix("_fused").removesuffix("_torch"))
    return JobCheck(name, found, refusal, tuple(notes), ModelSize(None, moments, 1, 1, ranks, False))


def _unknown(library: str, words: Sequence[str]) -> list[str]:
    return [f"not arguments of {library}, so the script's own or misspelt: {', '.join(words)}"] if words else []


class _Said(io.StringIO):
    def fileno(self) -> int:
        return 2  # faulthandler, which a version enables when it is imported, writes there later


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Without what a framework prints, which is yielded."""
    said = _Said()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said


def last_line(text: str) -> str:
    """The last line of what a framework said."""
    return (text.strip().splitlines() or ["no message"])[-1]
