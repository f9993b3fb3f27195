"""The blocks of keys, one per system, and the types of their values.

Invariant: a value that was accepted can be encoded, is finite and bounded; unknown keys are errors.

A new system is a subclass of `SystemConfig` here and one optional field of `schema.Config`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from ..base import faults
from ..base.run_directories import NAME_PATTERN
from ..errors import ConfigError
from .keys import LARGEST


def more(
    unit: str = "", expected: str = "", needs_system: bool = False, needs: str = "", switches: bool = False
) -> dict[str, Any]:
    """Further properties of a key: `expected` replaces the text derived from its type, `needs` names a key of the same
    block without which it has no effect, `switches` says that giving it switches its system on."""
    return {"unit": unit, "expected": expected, "needs_system": needs_system, "needs": needs, "switches": switches}


def _known_faults(specification: str) -> str:
    try:
        faults.require_known(faults.parse(specification))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return specification


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
NonEmptyText = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Faults = Annotated[str, AfterValidator(_known_faults)]


class Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _legible(cls, value: Any) -> Any:
        """Reject lone surrogates and NUL, which cannot be encoded or be in a path."""
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise PydanticCustomError("illegible", "not text")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if isinstance(value, int | float) and value > LARGEST:
            raise PydanticCustomError("too_large", "larger than {limit}", {"limit": LARGEST})
        return value


class SystemConfig(Block):
    """Base of the block of one system. `protects`: whether it protects training state."""

    protects: ClassVar[bool] = True


class ReftConfig(SystemConfig):
    """REFT: snapshots of each rank's share of the training state in the memory of its node."""

    interval: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1,
        description="interval between two snapshots; auto: begins with 1, and becomes what costs least by the times "
        "that the job measures and its failures",
        json_schema_extra=more("iterations", "an integer >= 1, or auto"),
    )
    versions: Literal["sync", "every"] | None = Field(
        None,
        description="with local SGD: take snapshots at synchronisations, where replicas share them out (sync); or also "
        "between them, each replica whole (every); unset: sync",
    )
    bucket_mib: int = Field(
        4, ge=1, le=1024, description="size of a bucket, copied and digested as one", json_schema_extra=more("MiB")
    )
    slots: int | None = Field(
        None,
        ge=2,
        le=5,
        description="where nodes protect each other: how many snapshots a rank keeps in memory, those for other nodes "
        "included, all claimed at start; with fewer than 5 the job may resume, after the failure of a process, from "
        "the snapshot that other nodes have; unset: 2 at start, and others, up to 5, as they are needed",
        json_schema_extra=more("snapshots", "an integer >= 2 and <= 5"),
    )
    redundancy: Literal["raim5", "raim6", "neighbour", "both", "none"] | None = Field(
        None,
        description="protection against lost nodes: parity over the nodes of a redundancy group, against the loss of "
        "one of them (raim5) or of any two (raim6); a copy on the node of a neighbouring pipeline stage (neighbour); "
        "that copy and raim5 (both); or none; unset: raim5, with BAFT neighbour",
    )
    group_nodes: Annotated[int, Field(ge=2, le=256)] | Literal["auto"] = Field(
        8,
        description="parity: cut a sharding group into redundancy groups of at most that many nodes; smaller ones "
        "survive more lost nodes and take more memory; auto: by the number of nodes of the job",
        json_schema_extra=more("nodes", "an integer >= 2 and <= 256, or auto"),
    )
    exchange_interval: int = Field(
        1,
        ge=1,
        description="interval between two snapshots that are sent to other nodes; longer if the network is too slow",
        json_schema_extra=more("snapshots"),
    )
    exchange_mbps: float = Field(
        0.0,
        ge=0,
        description="maximum rate at which a node sends to the others; 0: no limit",
        json_schema_extra=more("megabits per second"),
    )
    wait_seconds: float = Field(
        300.0,
        ge=0,
        description="with --nnodes MIN:MAX: how long to wait for a substitute of a lost node before continuing with "
        "fewer",
        json_schema_extra=more("seconds"),
    )
    checkpoint_dir: NonEmptyText | None = Field(
        None,
        description="write snapshots to storage as checkpoints here, and resume from them if memory has none; unset: "
        "none",
        json_schema_extra=more(expected="a folder that all nodes share"),
    )
    checkpoint_interval: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        100,
        description="interval between two checkpoints; 0: only on request and when protection ends; auto: begins with "
        "100, and is chosen as that of snapshots with auto, for failures that memory does not survive",
        json_schema_extra=more("iterations", "an integer >= 0, or auto", needs="checkpoint_dir"),
    )
    hw_rate: float | None = Field(
        None,
        ge=0,
        le=100,
        description="with an interval of auto: hardware failures of a node, per day; unset: 0 if sw_rate is given, "
        "else all failures of the job are observed, and taken for lost nodes",
        json_schema_extra=more("per day", "a number >= 0 and <= 100"),
    )
    sw_rate: float | None = Field(
        None,
        ge=0,
        le=100,
        description="the same of its software failures, which leave the memory of the node",
        json_schema_extra=more("per day", "a number >= 0 and <= 100"),
    )
    checkpoint_keep: int = Field(
        2, ge=1, description="how many newest checkpoints to keep", json_schema_extra=more(needs="checkpoint_dir")
    )
    checkpoint_seconds: float = Field(
        30.0,
        ge=0,
        description="how long ft-run, when the job ends in order, waits for a checkpoint",
        json_schema_extra=more("seconds", needs="checkpoint_dir"),
    )

    @property
    def begins_with(self) -> tuple[int, int]:
        """The intervals between snapshots, and between checkpoints, until the job has chosen others."""
        interval, checkpoints = self.interval, self.checkpoint_interval
        return 1 if interval == "auto" else interval, 100 if checkpoints == "auto" else checkpoints


class BaftConfig(SystemConfig):
    """BAFT: snapshots are copied to the node of a neighbouring pipeline stage while the pipeline is idle."""

    link_mbps: float | None = Field(
        None,
        gt=0,
        description="speed of a node's link, each way, by which bubbles are planned; unset: measured at start",
        json_schema_extra=more("megabits per second", "a number > 0"),
    )
    reserve_ms: float = Field(
        1.0,
        ge=0,
        description="time at both ends of a bubble in which nothing is sent, so that the pipeline's own messages come "
        "first; as long as a message between stages if that takes longer, up to a quarter of the bubble",
        json_schema_extra=more("milliseconds"),
    )
    granularity: Literal["bytes", "layer"] = Field(
        "bytes",
        description="fill bubbles to the byte, or with whole layers of the model",
    )
    profile_iterations: int = Field(
        6,
        ge=2,  # if a device clock lags behind, one is not recorded
        description="how many iterations to measure before bubbles are planned",
        json_schema_extra=more("iterations"),
    )


class PaftConfig(SystemConfig):
    """PAFT: replicas of parameters are compared and averaged over data parallelism, against silent corruption."""

    protects: ClassVar[bool] = False

    mode: Literal["dyn", "sync", "audit"] = Field(
        "dyn",
        description="average parameters behind the next iteration, as often as measured noise requires (dyn), or "
        "every h iterations while training waits (sync); or only compare replicas (audit)",
    )
    h: int = Field(
        10,
        ge=1,
        description="iterations between two averagings; with dyn, until the first one",
        json_schema_extra=more("iterations"),
    )
    h_min: int = Field(
        5, ge=1, description="smallest interval of dyn, with much noise", json_schema_extra=more("iterations")
    )
    h_max: int = Field(
        500, ge=1, description="largest interval of dyn, without noise", json_schema_extra=more("iterations")
    )
    noise_of: Literal["model", "largest"] = Field(
        "model",
        description="with dyn, whose noise sets the interval: that of the whole model, or of the tensor with the "
        "longest noise on any rank, the paper's p_max (largest)",
    )
    aggregate: Literal["mean", "median", "trimmed"] = Field(
        "mean",
        description="how replicas are averaged: mean; or, against large noise and at the cost of a sort, median or "
        "mean without the lowest and highest values (trimmed)",
    )
    trim: int = Field(
        1, ge=1, description="how many lowest and highest values to leave out", json_schema_extra=more("replicas")
    )
    average_optimizer_state: bool = Field(
        False, description="average the optimizer's state too: little is gained, and three times as much is sent"
    )
    audit_interval: int | None = Field(
        None,
        ge=0,
        description="interval between two audits, which compare digests of replicas; 0: none; unset: 10 with mode "
        "audit, else none",
        json_schema_extra=more("iterations", expected="an integer >= 0"),
    )
    audit_at: Literal["update", "forward"] = Field(
        "update",
        description="wait for the verdict before the next update, behind forward and backward; or before the next "
        "forward",
    )
    on_corruption: Literal["repair", "average", "rollback"] = Field(
        "repair",
        description="when replicas differ: copy from the majority, or average if there is none (repair); average; or "
        "go back to the newest snapshot whose replicas agreed (rollback)",
    )
    bucket_mib: int = Field(
        16, ge=1, le=1024, description="size of a bucket, averaged or digested as one", json_schema_extra=more("MiB")
    )

    @property
    def audits_every(self) -> int:
        """Iterations between two audits; 0 for none."""
        if self.audit_interval is None:
            return 10 if self.mode == "audit" else 0
        return self.audit_interval
