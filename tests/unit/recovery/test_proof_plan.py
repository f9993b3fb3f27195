"""What of a restore is proven, and what a comparison shows."""

import math
from dataclasses import replace

import pytest

from ft_plugins.recovery.facts import RankFacts
from ft_plugins.recovery.proof_plan import (
    ProofPlan,
    ProofVerdict,
    RankVerdict,
    judge_parts,
    judge_state,
    plan_proof,
    refused_proof,
    verdict_of_job,
)
from ft_plugins.recovery.recovery_plan import RecoveryPlan
from ft_plugins.snapshot.segment.ledger import LedgerPart
from ft_plugins.snapshot.segment.slots import Mark, Slot, SlotState, Version

V, BEFORE = Version(2, 42), Version(1, 41)  # a restore from iteration 41 opened lineage 2
PLAN = RecoveryPlan(V, "process", 3, 42, 0, "newest")
INPUTS, LOSS, STATE = LedgerPart.INPUT, LedgerPart.LOSS, LedgerPart.STATE


def rank(number, marks=None, **other):
    held = marks or {V: Mark.NONE, BEFORE: Mark.NONE, Version(1, 40): Mark.NONE}
    slots = [Slot(at, SlotState.CLEAN, version, mark=mark) for at, (version, mark) in enumerate(held.items())]
    return replace(RankFacts(number, tuple(slots), 2, 42), **other)


def test_the_iteration_is_computed_again_from_the_version_before_which_every_rank_has():
    assert plan_proof(PLAN, [rank(0), rank(1)]) == ProofPlan(BEFORE, 42)


@pytest.mark.parametrize(
    ("plan", "facts", "reason"),
    [
        (PLAN, [rank(0), rank(1, {V: Mark.NONE, Version(1, 40): Mark.NONE})], "ranks 1 do not hold iteration 41"),
        (PLAN, [rank(0, {V: Mark.NONE, Version(1, 40): Mark.NONE})], "there is no version of iteration 41"),
        (replace(PLAN, tier="node"), [rank(0)], "parts of it came from other nodes"),
        (PLAN, [rank(0), rank(1, {V: Mark.NONE, Version(2, 41): Mark.NONE})], "ranks 0-1 do not hold iteration 41"),
        (PLAN, [rank(0), rank(1, proving=42)], "the job failed while iteration 42 was proven"),
        (PLAN, [rank(0, ended=42), rank(1)], "training had ended in order after iteration 42"),
        (PLAN, [rank(0, varies=True), rank(1)], "not provable: kernels vary"),
        (replace(PLAN, at_least=True), [rank(0)], "which iterations were completed is not known"),
        (PLAN, [rank(0, {V: Mark.NONE, BEFORE: Mark.MISMATCHED})], "of iteration 41 it is not known"),
        (replace(PLAN, mark=Mark.CERTIFIED), [rank(0)], "of iteration 41 it is not known"),
        (replace(PLAN, version=None), [], "nothing was restored from memory"),
    ],
)
def test_what_cannot_be_computed_again_says_why(plan, facts, reason):
    proof = plan_proof(plan, facts)
    assert proof.start is None and not proof.until and reason in proof.reason


@pytest.mark.parametrize(
    ("plan", "mode", "loaded", "refused"),
    [
        (PLAN, "auto", 40, ""),
        (PLAN, "before:50", 0, "--ftp-resume before:50"),
        (replace(PLAN, tier="storage"), "auto", 0, "restored from storage"),
        (replace(PLAN, tier="storage", version=None), "auto", 42, "restored from the framework's own checkpoint"),
        (PLAN, "auto", 41, "the framework has loaded its own checkpoint of iteration 41"),
    ],
)
def test_what_is_restored_otherwise_is_not_proven(plan, mode, loaded, refused):
    assert refused_proof(plan, mode, loaded) == refused


def test_iterations_that_were_completed_after_the_restored_one_are_computed_again_anyway():
    assert plan_proof(replace(PLAN, completed=45), [rank(0, {V: Mark.NONE})]) == ProofPlan(None, 45)


def test_a_difference_that_ended_the_job_is_looked_for_again_and_another_version_too():
    assert plan_proof(PLAN, [rank(0, proving=42, condemned=True), rank(1, proving=42)]).start == BEFORE
    assert plan_proof(PLAN, [rank(0, proving=30)]).start == BEFORE
    assert plan_proof(PLAN, [rank(0, {V: Mark.CERTIFIED, BEFORE: Mark.DIVERGED})]).start == BEFORE


@pytest.mark.parametrize(
    ("parts", "compared", "deterministic", "mode", "verdict", "ends"),
    [
        ((), (INPUTS,), True, "auto", ProofVerdict.DIFFERS, True),  # as by a buffer beside the model
        ((LOSS,), (INPUTS, LOSS), True, "auto", ProofVerdict.DIFFERS, True),
        ((LOSS,), (INPUTS, LOSS), False, "auto", ProofVerdict.VARIES, False),
        ((LOSS,), (INPUTS, LOSS), False, "stop", ProofVerdict.VARIES, True),
        ((), (), False, "auto", ProofVerdict.VARIES, False),  # what it read is not known, as often on a GPU
        ((LedgerPart.COUNTERS,), (), False, "auto", ProofVerdict.DIFFERS, True),
        ((INPUTS,), (INPUTS,), True, "auto", ProofVerdict.DIFFERS, False),  # a loader that is not reproducible
        ((), (INPUTS,), True, "warn", ProofVerdict.DIFFERS, False),
    ],
)
def test_items_that_differ_are_judged_by_all_that_led_to_them(parts, compared, deterministic, mode, verdict, ends):
    found = {"b": (3, 0.5), "a": (1, math.nan)}
    judged = judge_state(42, 10, found, parts, compared, deterministic, mode)
    assert judged.verdict == RankVerdict(verdict, 10, 2, 42, 0.5) and judged.ends is ends
    assert "a (1 element, by up to nan), b (3 elements, by up to 0.5)" in judged.sentence


def test_no_item_that_differs_proves_unless_the_ledger_knows_better():
    assert judge_state(42, 10, {}, (), (INPUTS,), True).verdict == RankVerdict(ProofVerdict.PROVEN, 10, 0, 42)
    for part in (LedgerPart.LIBRARY, LedgerPart.GRADIENTS):
        assert judge_state(42, 10, {}, (part,), (), True).verdict.verdict is ProofVerdict.DIFFERS


@pytest.mark.parametrize(
    ("compared", "differing", "deterministic", "verdict", "last"),
    [
        ([{INPUTS, STATE}, {INPUTS, STATE}, {INPUTS}], (), True, ProofVerdict.PROVEN, 44),
        ([{INPUTS, LOSS}], (), True, ProofVerdict.UNKNOWN, 0),  # one input is no proof, nor is one number
        ([{INPUTS, STATE}], (STATE,), True, ProofVerdict.DIFFERS, 43),
        ([{INPUTS, STATE}], (STATE, LOSS), False, ProofVerdict.VARIES, 43),
        ([{STATE}], (STATE, INPUTS), False, ProofVerdict.DIFFERS, 43),
    ],
)
def test_iterations_are_judged_by_the_ledger_alone(compared, differing, deterministic, verdict, last):
    judged = judge_parts(dict(enumerate(compared, 43)), differing, 10, deterministic)
    assert judged == RankVerdict(verdict, 10, 0, last)


def test_the_verdict_of_the_job_is_the_worst_of_those_that_know_anything_and_says_how_many_they_are():
    known, unknown = RankVerdict(ProofVerdict.PROVEN, 43, 0, 42), RankVerdict(ProofVerdict.UNKNOWN)
    varies, again = RankVerdict(ProofVerdict.VARIES, 43, 2, 42, 3e-7), "iterations 40 to 42 computed again"
    for verdicts, first, words in (
        ([known] * 8, 40, f"proven: {again}, identical on 8 ranks, 344 items"),
        ([known] * 6 + [unknown] * 2, 40, f"proven: {again}, identical on 6 of 8 ranks, 258 items"),
        ([replace(known, last=43), known], 42, "proven: iteration 42 computed again, identical on 2 ranks, 86 items"),
        ([unknown] * 2, 42, "unproven: no rank knows captured bytes of iteration 42 or later"),
        (
            [known, varies],
            42,
            "not provable: kernels vary: iteration 42 computed again on 2 ranks, 2 of 86 items differ by up to 3e-07, "
            "although counters, schedules, random numbers and all that is known of inputs are equal; training goes on "
            "from what was computed now; not tried again",
        ),
    ):
        packed = [RankVerdict.unpack(one.pack()) for one in verdicts]
        assert packed == verdicts and verdict_of_job(packed, first)[1] == words
    with pytest.raises(ValueError, match="a verdict of 3 bytes"):
        RankVerdict.unpack(b"abc")
