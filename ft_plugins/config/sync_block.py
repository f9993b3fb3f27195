"""The keys of local SGD: when and how replicas that train on their own are synchronised.

Keys that only some policies have are unset by default, so that giving one to another policy is an error
(`checks.require_consistent_sync`); a property has the value in force.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .blocks import NonEmptyText, SystemConfig, more

_PERIOD_SECONDS = 600.0  # between synchronisations of A-EDiT, as in the paper's experiments
_REPLAN = 0.1  # of a period of DreamDDP: more than noise in a measured iteration, less than a layer that does not hide


class SyncConfig(SystemConfig):
    """Local SGD: replicas train on their own and are synchronised now and then, for slow links and stragglers."""

    protects: ClassVar[bool] = False

    policy: Literal["post_local_sgd", "diloco", "edit", "a_edit", "dreamddp"] = Field(
        "edit",
        description="how replicas are synchronised: their mean (post_local_sgd); the mean, through an outer optimizer "
        "(diloco); the mean of what passes EDiT's penalty, through an outer optimizer (edit); the same by time, "
        "each replica making as many iterations as it can (a_edit; in a training loop of your own only); or the mean, "
        "some layers in each iteration, behind the backward (dreamddp)",
        json_schema_extra=more(switches=True),
    )
    tau: int = Field(
        128,
        ge=1,
        description="local iterations between two synchronisations of all layers",
        json_schema_extra=more("iterations"),
    )
    h: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="with dreamddp, iterations in which each layer is averaged once; auto: the fewest in which "
        "everything hides behind the backward; unset: 5, or the number of layers if that is less",
        json_schema_extra=more("iterations", expected="an integer >= 1, or auto"),
    )
    schedule: Literal["planned", "equal"] | None = Field(
        None,
        description="with dreamddp, which layers are averaged in which iteration: as planned from a profile (planned), "
        "or as many in each (equal); unset: planned",
        json_schema_extra=more(expected="planned or equal"),
    )
    profile: NonEmptyText | None = Field(
        None,
        description="with dreamddp, the profile of layers to plan from, once; unset: this job is measured, and planned "
        "again if averaging hides less than planned",
        json_schema_extra=more(expected="a file"),
    )
    replan: float | None = Field(
        None,
        gt=0,
        description="with dreamddp, by how much of its time a period may be longer than planned before layers are "
        "planned again; unset: 0.1",
        json_schema_extra=more(expected="a number > 0"),
    )
    order: Literal["auto", "average_first", "update_first"] | None = Field(
        None,
        description="with dreamddp, average a layer before its update (average_first), or update it as soon as its "
        "backward has ended, then average it (update_first; in a loop of plain torch that changes no gradient between "
        "backward and update); unset: auto, which is average_first and says why",
        json_schema_extra=more(expected="one of auto, average_first, update_first"),
    )
    seconds: float | None = Field(
        None,
        gt=0,
        description="with a_edit, time between two synchronisations, in place of tau; unset: 600",
        json_schema_extra=more("s", expected="a number > 0"),
    )
    weights: Literal["uniform", "tokens"] | None = Field(
        None,
        description="with a_edit, how replicas that made different numbers of iterations are weighted: the same "
        "(uniform), or by the tokens that they have trained on, which are proportional to their iterations (tokens); "
        "the penalty's weights are multiplied by it; unset: uniform",
        json_schema_extra=more(expected="uniform or tokens"),
    )
    warmup: int = Field(
        0,
        ge=0,
        description="first iterations, in which gradients are reduced over all replicas as without local SGD",
        json_schema_extra=more("iterations"),
    )
    outer_lr: float | None = Field(
        None,
        gt=0,
        description="learning rate of the outer optimizer; unset: 0.8 with edit and a_edit, 0.7 with diloco",
        json_schema_extra=more(expected="a number > 0"),
    )
    outer_momentum: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Nesterov momentum of the outer optimizer; unset: 0.85 with edit and a_edit, 0.9 with diloco",
        json_schema_extra=more(expected="a number >= 0 and < 1"),
    )
    penalty: bool | None = Field(
        None,
        description="judge replicas by the norms of their changes: leave out outliers, weight the others, clip the "
        "mean; unset: true with edit and a_edit, which alone have it",
        json_schema_extra=more(expected="true or false"),
    )
    alpha: float = Field(
        0.02, gt=0, lt=1, description="weight of the newest norm in the moving mean and deviation of norms"
    )
    threshold: float = Field(3.0, gt=0, description="a norm this many deviations above the moving mean is an outlier")
    penalty_warmup: int = Field(
        10,
        ge=0,
        description="first synchronisations, in which norms are recorded but none is an outlier",
        json_schema_extra=more("synchronisations"),
    )
    weighting: bool = Field(
        True, description="weight replicas by the norms of their changes, the smaller the more; false: all the same"
    )
    clip: float = Field(
        10.0, gt=0, description="largest norm of a module's mean change; a larger one is scaled down to it"
    )
    apply: Literal["auto", "forward", "update", "wait"] = Field(
        "auto",
        description="when a synchronisation ends: just before the next forward of each module (forward); before the "
        "next update, behind a whole iteration, for fp32 master parameters (update); or at once, while training waits "
        "(wait); auto: with edit update where there are master parameters, else forward; with other policies wait",
    )
    prefetch: bool = Field(
        True,
        description="with apply forward: synchronise the next module behind the forward of the present one; false: "
        "each one only when it is needed, with the same result",
    )
    offload: bool = Field(
        False,
        description="keep the last synchronised parameters and the outer optimizer's state in host memory",
    )
    timeout: float = Field(
        1800.0,
        ge=1,
        description="how long a rank waits for another replica in a synchronisation before it ends, so that the job "
        "restarts; a replica may lawfully be late by as much as it is slower over tau iterations",
        json_schema_extra=more("seconds"),
    )
    shard_ranks: int | None = Field(
        None,
        ge=1,
        description="data-parallel ranks that form one replica and reduce gradients in every iteration (ZeRO and FSDP "
        "shards); unset: one; FSDP2 has its mesh instead, Megatron --num-distributed-optimizer-instances, and another "
        "number is refused",
        json_schema_extra=more("ranks", "an integer >= 1"),
    )

    @property
    def is_edit(self) -> bool:
        """Whether the policy is EDiT's, by iterations or by the clock."""
        return self.policy in ("edit", "a_edit")

    @property
    def penalizes(self) -> bool:
        """Whether replicas are judged by the norms of their changes."""
        return self.is_edit and self.penalty is not False

    @property
    def period(self) -> float | None:
        """Seconds between synchronisations; None if they are counted in iterations."""
        return (_PERIOD_SECONDS if self.seconds is None else self.seconds) if self.policy == "a_edit" else None

    @property
    def is_layered(self) -> bool:
        """Whether layers are averaged in different iterations (DreamDDP)."""
        return self.policy == "dreamddp"

    @property
    def measures_layers(self) -> bool:
        """Whether layers are planned from what this job measures."""
        return self.is_layered and self.schedule != "equal" and self.profile is None

    @property
    def replans_beyond(self) -> float:
        """By how much of its time a period may be longer than planned."""
        return _REPLAN if self.replan is None else self.replan
