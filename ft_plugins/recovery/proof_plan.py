"""Decide whether a restore is proven, and what the proof shows. Pure.

A restore of every byte is wrong if something begins again of which versions know nothing: a buffer of a loss function,
the order of a loader. So the last completed iteration is computed again from the version before it, and each rank
compares what it has then with the version that recovery chose (`systems.reft.proof`). That version stays the base:
nothing newer is captured before. Where iterations after the restored version had been completed, they are computed
again anyway, and the ledger compares their captured bytes.

Invariant: all ranks decide the same, from the same facts. No version older than one iteration is gone back to, and a
failure during a proof is not answered by another one of the same version.

In: the plan of a recovery, the facts of all ranks; what a rank has compared. Out: `ProofPlan`; `RankVerdict`s, and the
job's verdict in words.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..redundancy.node_kinds import runs, shortened
from ..snapshot.segment.ledger import LedgerPart
from ..snapshot.segment.slots import Mark, Version
from .facts import RankFacts
from .recovery_plan import RecoveryPlan
from .source_choice import iteration_bound

_PACKED = struct.Struct("<BIIId")  # the fields of a `RankVerdict`
# what an iteration computes: kernels may vary it, all else is the loop's
COMPUTED = {LedgerPart.STATE, LedgerPart.GRADIENTS, LedgerPart.LOSS, LedgerPart.NORM}
_INPUTS = {LedgerPart.FIRST_READ, LedgerPart.INPUT}
_NAMED = 4  # items in a message


@dataclass(frozen=True)
class ProofPlan:
    """How the restored version is proven. `start`: the version that is loaded in its place, from which its iteration is
    computed again; None if that is not done. `until`: the last iteration that is compared, 0 for none; `reason`: why
    nothing is."""

    start: Version | None = None
    until: int = 0
    reason: str = ""


def plan_proof(plan: RecoveryPlan, facts: Sequence[RankFacts], refused: str = "") -> ProofPlan:
    """The proof of `plan`, whose version each rank has in its own segment by now. `refused`: why the job does without
    one, '' if it does not."""
    version = plan.version
    if version is None or refused:
        return ProofPlan(reason=refused or "nothing was restored from memory")
    if plan.at_least:
        return ProofPlan(reason="which iterations were completed is not known")
    if plan.completed > version.iteration:
        return ProofPlan(until=plan.completed)
    proving = any(rank.proving == version.iteration for rank in facts)
    if proving and not any(rank.condemned for rank in facts):  # else a difference ended it
        return ProofPlan(reason=f"the job failed while iteration {version.iteration} was proven")
    if any(rank.ended == version.iteration for rank in facts):  # a script that ends there would end there again
        return ProofPlan(reason=f"training had ended in order after iteration {version.iteration}")
    if any(rank.varies for rank in facts):
        return ProofPlan(reason="not provable: kernels vary")
    earlier = version.iteration - 1
    if plan.tier != "process":
        return ProofPlan(reason=f"parts of it came from other nodes, which have no iteration {earlier}")
    before = [_before(rank, version) for rank in facts]
    lacking = [rank.rank for rank, one in zip(facts, before, strict=True) if one is None]
    if len(lacking) == len(facts):
        return ProofPlan(reason=f"there is no version of iteration {earlier}")
    if lacking or len(set(before)) > 1:
        ranks = ", ".join(shortened(runs(lacking or [rank.rank for rank in facts])))
        return ProofPlan(reason=f"ranks {ranks} do not hold iteration {earlier}")
    start = before[0]
    marks = [slot.mark for rank in facts for slot in rank.slots if slot.version == start]
    if Mark.MISMATCHED in marks or plan.mark.preferred and not any(mark.preferred for mark in marks):
        return ProofPlan(reason=f"of iteration {earlier} it is not known that replicas agree")
    return ProofPlan(start, version.iteration)


def refused_proof(plan: RecoveryPlan, mode: str, loaded: int) -> str:
    """Why the restore by `plan` is not to be proven; '' if it is. `mode`: --ftp-resume; `loaded`: the iteration of the
    framework's own checkpoint, 0 for none."""
    if iteration_bound(mode) is not None:
        return f"--ftp-resume {mode}"
    if plan.tier == "storage":
        return "restored from storage" if plan.version else "restored from the framework's own checkpoint"
    if plan.version is not None and loaded >= plan.version.iteration - 1 > 0:  # the script may go on from that
        return f"the framework has loaded its own checkpoint of iteration {loaded}"
    return ""


def _before(rank: RankFacts, version: Version) -> Version | None:
    """The version of the iteration before, by which this rank came to `version`: newer lineages void newer versions, so
    there is one at most."""
    older = (one for one in rank.restorable() if one.iteration == version.iteration - 1 and one < version)
    return max(older, default=None)


class ProofVerdict(IntEnum):
    """What a rank can say of a restore. The worst one of all ranks that know anything is the job's."""

    UNKNOWN = 0  # captured bytes of nothing that was computed again are known here
    PROVEN = 1
    VARIES = 2  # they differ, although all that leads to them is equal: kernels vary
    DIFFERS = 3


@dataclass(frozen=True)
class RankVerdict:
    """The verdict of one rank: of how many items it is, how many differ, the last iteration whose bytes were compared,
    and by how much they differ at most."""

    verdict: ProofVerdict
    items: int = 0
    differing: int = 0
    last: int = 0
    largest: float = 0.0

    def pack(self) -> bytes:
        return _PACKED.pack(self.verdict, self.items, self.differing, self.last, self.largest)

    @classmethod
    def unpack(cls, packed: bytes) -> RankVerdict:
        """Raises ValueError."""
        if len(packed) != _PACKED.size:
            raise ValueError(f"a verdict of {len(packed)} bytes; expected {_PACKED.size}")
        verdict, items, differing, last, largest = _PACKED.unpack(packed)
        return cls(ProofVerdict(verdict), items, differing, last, largest)


@dataclass(frozen=True)
class StateVerdict:
    """Whether a rank's state after an iteration that was computed again is that of the restored version; if not, a
    sentence that says what is not, and whether the job `ends`."""

    verdict: RankVerdict
    sentence: str = ""
    ends: bool = False


def judge_parts(
    compared: Mapping[int, Collection[LedgerPart]], differing: Collection[LedgerPart], items: int, deterministic: bool
) -> RankVerdict:
    """Judge iterations by the ledger alone: what it `compared` of each, and what differs in any of them. `items`: of
    how many it captures the bytes."""
    last = max((iteration for iteration, parts in compared.items() if LedgerPart.STATE in parts), default=0)
    if not differing:
        return RankVerdict(ProofVerdict.PROVEN if last else ProofVerdict.UNKNOWN, items, 0, last)
    varies = not deterministic and not set(differing) - COMPUTED
    return RankVerdict(ProofVerdict.VARIES if varies else ProofVerdict.DIFFERS, items, 0, last or max(compared))


def judge_state(
    iteration: int,
    items: int,
    differing: Mapping[str, tuple[int, float]],
    parts: Collection[LedgerPart],
    compared: Collection[LedgerPart],
    deterministic: bool,
    mode: str = "auto",
) -> StateVerdict:
    """Judge the state of a rank. `differing`: of its `items`, in how many elements and by how much at most (nan: they
    are no numbers). `parts`: what else of the iteration differs, of all that the ledger `compared`; it ends the job by
    itself if that shows that the loop did not continue. `deterministic`: kernels do not vary here. `mode`:
    --ftp-on-difference.

    A loader that is not reproducible reads what no iteration had read. State differs then, and ends nothing.
    """
    loop = set(parts) - COMPUTED
    if not differing:
        verdict = ProofVerdict.DIFFERS if parts else ProofVerdict.PROVEN
        return StateVerdict(RankVerdict(verdict, items, 0, iteration))
    largest = max((most for _, most in differing.values() if not math.isnan(most)), default=math.nan)
    varies = not loop and not deterministic
    verdict = ProofVerdict.VARIES if varies else ProofVerdict.DIFFERS
    named = [
        f"{name} ({elements} element{'s' * (elements > 1)}, by up to {most:.3g})"
        for name, (elements, most) in sorted(differing.items())
    ]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    sentence = f"iteration {iteration} was computed again, and {len(differing)} of {items} items of the state are not "
    sentence += f"what they were: {', '.join(named[:_NAMED])}{more}"
    if not loop and LedgerPart.INPUT in compared:
        sentence += "; what it read, counters, schedules and random numbers are equal, so something begins again that "
        sentence += "is no part of the captured state, such as a buffer of a loss function"
    ends = mode == "stop" or (mode == "auto" and not varies and not _INPUTS & loop)
    return StateVerdict(RankVerdict(verdict, items, len(differing), iteration, largest), sentence, ends)


def verdict_of_job(verdicts: Sequence[RankVerdict], first: int) -> tuple[ProofVerdict, str]:
    """The verdict of all ranks, and one line. `first`: the first iteration that was computed again."""
    known = [one for one in verdicts if one.verdict is not ProofVerdict.UNKNOWN]
    if not known:
        return ProofVerdict.UNKNOWN, f"unproven: no rank knows captured bytes of iteration {first} or later"
    worst, last = max(one.verdict for one in known), min(one.last for one in known)
    again = f"iteration {first}" if first >= last else f"iterations {first} to {last}"
    count, every = len(known), len(verdicts)
    of = f"on {count} of {every} ranks" if count < every else f"on {count} rank{'s' * (count > 1)}"
    items, differing = sum(one.items for one in known), sum(one.differing for one in known)
    largest = max((one.largest for one in known if one.differing and not math.isnan(one.largest)), default=math.nan)
    apart = f"{differing} of {items} items differ by up to {largest:.3g}" if differing else "it differs"
    if worst is ProofVerdict.PROVEN:
        return worst, f"proven: {again} computed again, identical {of}, {items} items"
    if worst is ProofVerdict.VARIES:
        return worst, (
            f"not provable: kernels vary: {again} computed again {of}, {apart}, although counters, schedules, random "
            "numbers and all that is known of inputs are equal; training goes on from what was computed now; not tried "
            "again"
        )
    return worst, f"differs: {again} computed again {of}, and {apart}"
