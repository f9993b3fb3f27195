"""Choose between memory and the framework's own checkpoint, as `--ftp-resume` asks. Pure.

Invariant: training never starts from the beginning unasked while a version is sealed anywhere, or something damaged may
have been one; what was asked for and is not there is refused by name.

In: the plan from memory, the value of `--ftp-resume`, the iteration that the framework has loaded. Out: a plan.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..errors import ResumeError
from ..redundancy.node_kinds import shortened
from ..snapshot.segment.slots import Mark
from .recovery_plan import RecoveryPlan


def iteration_bound(mode: str) -> int | None:
    """N of `--ftp-resume before:N`: only older versions may be restored. None for any other `mode`."""
    name, _, bound = mode.partition(":")
    return int(bound) if name == "before" else None


def is_doubted(plan: RecoveryPlan, loaded: int) -> bool:
    """Whether the certified version of `plan` is restored before a newer checkpoint of the framework's own, of
    iteration `loaded`: it was saved when no audit had found that replicas agree. That is known of iterations that this
    job has completed, or was about to complete; one beyond them is of a job that went on elsewhere."""
    if plan.mark is not Mark.CERTIFIED:
        return False
    pending = plan.agreed is not None and plan.agreed < loaded <= plan.completed + 1
    return pending or (plan.doubted is not None and plan.doubted[0] <= loaded <= plan.doubted[1])


def set_aside(plan: RecoveryPlan, loaded: int) -> RecoveryPlan | None:
    """`plan`, if its version is restored before a newer checkpoint of the framework's own, of iteration `loaded`: it
    `is_doubted`, or it lacks state and is of an iteration that this job completed, or was about to complete, so that
    the job comes to it again. Else None."""
    if is_doubted(plan, loaded):
        return replace(plan, refused=loaded)
    return replace(plan, repeated=loaded) if plan.lacking and loaded <= plan.completed + 1 else None


def choose_source(plan: RecoveryPlan, mode: str, loaded: int) -> RecoveryPlan:
    """Adjust `plan` to `--ftp-resume` (`mode`) and the framework's own checkpoint of iteration `loaded` (0: none).

    If both could be used, the larger iteration wins, unless the checkpoint is `set_aside`. Raises ResumeError if what
    was asked for is missing, and instead of a silent start from the beginning if there was state: no version becomes
    void before the user has said so.
    """
    if mode == "storage" and not loaded:
        raise ResumeError(
            "--ftp-resume storage was asked for, but found no checkpoint in --reft-checkpoint-dir, and the framework "
            "has loaded none; name one by its own flags (Megatron-LM: --load), or restore from memory with "
            "--ftp-resume auto"
        )
    if (before := iteration_bound(mode)) is not None:
        require_older(loaded, before)
        if plan.version is None and not loaded:
            raise ResumeError(nothing_older(plan, mode))
        if plan.version is not None and plan.version.iteration >= loaded:
            return replace(plan, reason=f"--ftp-resume {mode}")
    if mode == "memory" and plan.version is None:
        raise ResumeError(f"--ftp-resume memory was asked for, but {plan.reason}; --ftp-resume auto starts without")
    if mode in ("auto", "memory"):
        if plan.version is not None and plan.version.iteration >= loaded:
            return plan
        if plan.version is not None and (aside := set_aside(plan, loaded)) is not None:
            return aside
        if plan.state_lost and not loaded:
            moved = "" if plan.gone or plan.damage else "; were ranks moved between nodes?"
            sealed = f"; in memory: {plan.in_memory}" if plan.in_memory else ""
            damage = "".join(f"; {entry}" for entry in shortened(plan.damage))
            raise ResumeError(
                f"the state in memory cannot be restored ({plan.reason}{moved}){sealed}{damage}; "
                "start again as before to try once more, or start from the beginning with --ftp-resume fresh"
            )
        reason = plan.reason if plan.version is None else f"newer than version {plan.version.iteration} in memory"
    else:
        reason = f"--ftp-resume {mode}"
    if loaded and plan.lacking:
        reason += f"; it lacks {plan.lacking}, which begins again"
    completed = max(plan.completed, loaded) if plan.at_least else plan.completed
    lost = max(0, completed - loaded)
    return RecoveryPlan(
        None, "storage" if loaded else "none", plan.lineage, completed, lost, reason, loaded, plan.at_least,
        damage=plan.damage, run="" if mode == "fresh" else plan.run, drawn=plan.drawn,
    )  # fmt: skip


def require_older(loaded: int, before: int) -> None:
    """Raises ResumeError if the framework has loaded a checkpoint that is not older than iteration `before`: a later
    restart, which loads it again, would prefer it to what was restored."""
    if loaded >= before:
        raise ResumeError(
            f"--ftp-resume before:{before} was asked for, but the framework has loaded its own checkpoint of iteration "
            f"{loaded}, which every restart would load again: have it load an older one, or none (Megatron-LM: the "
            "iteration in latest_checkpointed_iteration.txt of --load)"
        )


def nothing_older(plan: RecoveryPlan, mode: str, stored: Collection[str] = ()) -> str:
    """The message that `--ftp-resume before:N` finds nothing, and what there is instead. `stored`: checkpoints."""
    return (
        f"--ftp-resume {mode} was asked for, but there is no older version that all ranks can have; in memory: "
        f"{plan.in_memory or 'none'}; checkpoints: {', '.join(shortened(sorted(stored))) or 'none'}; name a later "
        "iteration, have the framework load a checkpoint of its own, or start from the beginning with --ftp-resume "
        "fresh"
    )
