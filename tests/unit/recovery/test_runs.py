"""The identity of a run: kept by memory and checkpoints, drawn once, and never mixed with that of another run."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ft_plugins.base.files import write_digested
from ft_plugins.collective import Collective
from ft_plugins.errors import ResumeError
from ft_plugins.recovery import storage
from ft_plugins.recovery.facts import NodeFacts, RankFacts, run_of, usable
from ft_plugins.recovery.recovery_plan import RecoveryPlan, plan_recovery
from ft_plugins.recovery.source_choice import choose_source
from ft_plugins.recovery.storage import StorageTier
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.checkpoint import checkpoint, lease, persist
from ft_plugins.snapshot.checkpoint.checkpoint import CheckpointManifest
from ft_plugins.snapshot.checkpoint.lease import Lease
from ft_plugins.snapshot.segment.slots import Slot, SlotState, Version

A, B, DRAWN = "a" * 32, "b" * 32, "d" * 32
NOTHING = RecoveryPlan(None, "none", 1, 0, 0, "no version was captured before", drawn=DRAWN)
FINGERPRINT = {"layers": 4}


def rank(number, *iterations, run=A, lineage=3, **more):
    slots = tuple(Slot(at, SlotState.CLEAN, Version(lineage, each)) for at, each in enumerate(iterations))
    return RankFacts(number, slots, lineage, max(iterations, default=0), run=run, drawn=DRAWN, **more)


# ---- memory ----


def test_a_restart_keeps_its_run_a_replaced_rank_has_none_and_a_first_start_draws_one():
    assert plan_recovery([rank(0, 7, 8), rank(1, 7, 8)]).run == A
    replaced = plan_recovery([rank(0, 7, 8), rank(1, run="", lineage=0)])
    assert (replaced.run, replaced.version) == (A, None)
    first = plan_recovery([rank(0, run="", lineage=0), rank(1, run="", lineage=0)])
    assert (first.run, first.drawn) == ("", DRAWN)
    assert choose_source(plan_recovery([rank(0, 7)]), "fresh", 0).run == ""
    assert choose_source(plan_recovery([rank(0, 7)]), "storage", 9).run == A


def test_memory_of_two_runs_of_one_name_is_never_combined():
    """Given two jobs that captured the same version each, and a start on one node of each."""
    met = plan_recovery([rank(0, 7, 8), rank(1, 7, 8, run=B)])
    assert met.version is None and met.state_lost and met.run == ""
    with pytest.raises(ResumeError, match="ranks 0-1: memory of another run of this job's name: end the job on"):
        choose_source(met, "auto", 0)
    assert choose_source(met, "fresh", 0).tier == "none"
    older = plan_recovery([rank(0, 7, 8), rank(1, 7, 8, run=B, lineage=2)])
    assert older.version is None and older.state_lost and older.run == A
    with pytest.raises(ResumeError, match="rank 1: memory of another run"):
        choose_source(older, "auto", 0)


def test_after_a_fresh_start_what_a_node_kept_of_the_run_before_is_void():
    back = plan_recovery([rank(0, 2, run=B, lineage=4, from_nothing=True), rank(1, 8, lineage=3)])
    assert (back.run, back.version) == (B, None) and "another run" not in back.reason


def test_what_another_node_holds_of_another_run_is_not_fetched():
    held = {0: frozenset({Version(3, 8)})}
    own, other = NodeFacts(held, run=(3, A)), NodeFacts(held, frozenset({Version(3, 8)}), run=(2, B), lineage=2)
    ranks = [rank(0), rank(1, 8)]
    assert run_of(ranks, [own, other]) == A
    _, nodes, _, _ = usable(ranks, [own, other], A)
    assert nodes == [own, NodeFacts({}, lineage=2)]


# ---- storage ----


def segment():
    return SimpleNamespace(fingerprint=FINGERPRINT, slots=lambda: (), dirty=lambda *_: None)


def stored(base, lineage, iteration, run):
    folder = base / f"v{lineage}-{iteration}"
    folder.mkdir(parents=True)
    described = CheckpointManifest(checkpoint.FORMAT, "job", lineage, iteration, 1, FINGERPRINT, 1, run=run)
    content = {key: value for key, value in vars(described).items() if value is not None}
    write_digested(folder / "manifest.json", content)


class Start:
    """A start of a job with one rank."""

    def __init__(self, folder, *nodes):
        self.reported = []

        def report(kind, reason):
            self.reported.append(f"{kind.name}: {reason}")

        self.tier = StorageTier(folder, "job", Collective(), report, nodes or ("n",))

    def recover(self, memory=NOTHING, mode="auto", loaded=0):
        plan = self.tier.recover(memory, mode, loaded, segment(), 1)
        plan = replace(plan, run=plan.run or plan.drawn)
        self.tier.take(plan)
        return plan


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(persist, "read_rank", lambda *_: 0)
    monkeypatch.setattr(storage, "_PAUSE_SECONDS", 0.01)
    return tmp_path / "job"


def held_by(run, lineage, **changes):
    return replace(Lease(lineage, run, ("elsewhere",), False, ("there",), 1.8e9, 1.8e9), **changes)


def take(base, held):
    base.mkdir(exist_ok=True)
    lease.take(base, held, None)


def test_a_first_start_takes_the_folder_with_the_run_that_it_draws(base):
    plan = Start(base.parent, "x", "y", "x").recover()
    found = lease.newest(base)
    assert found is not None and plan.run == DRAWN
    assert (found.lineage, found.run, found.nodes, found.alone) == (1, DRAWN, ("x", "y"), False)
    assert found.processes == (liveness.identified(os.getpid()),)


@pytest.mark.parametrize(("run", "expected"), [(A, A), ("", DRAWN)])
def test_a_checkpoint_gives_its_run_and_that_of_the_build_before_gets_one(base, run, expected):
    stored(base, 2, 60, run)
    plan = Start(base.parent).recover()
    assert (plan.version, plan.run, plan.lineage) == (Version(2, 60), expected, 3)
    assert (lease.newest(base) or NOTHING).run == expected


def test_a_start_without_memory_waits_for_a_lease_that_nobody_renews_and_continues_its_run(base, monkeypatch, capsys):
    monkeypatch.setattr(lease, "HOLD_SECONDS", 0.05)
    take(base, held_by(A, 5))
    stored(base, 2, 60, A)
    stored(base, 7, 90, B)  # of a run that was given up, whose lineages are more
    plan = Start(base.parent).recover()
    assert (plan.version, plan.run, plan.lineage) == (Version(2, 60), A, 8)
    found = lease.newest(base)
    assert found is not None and (found.lineage, found.run) == (8, A)
    assert capsys.readouterr().out.count("seconds to see whether its last user lives (run aaaaaaaa on elsewhere") == 1


def test_a_lease_that_is_renewed_meanwhile_refuses_the_start_with_both_runs_and_what_to_do(base, monkeypatch):
    take(base, held_by(A, 5))
    stored(base, 5, 60, A)
    before = lease.newest
    looks = iter([1.8e9 + at for at in range(0, 1000, 5)])

    def renewed(*arguments):
        lease.renew(base, held_by(A, 5, renewed=next(looks)))
        return before(*arguments)

    monkeypatch.setattr(lease, "newest", renewed)
    said = r"is in use by run aaaaaaaa on elsewhere, .*this start, on n at .* has no memory of a run: .*'ft-plugins"
    for mode in ("auto", "storage", "fresh", "before:70"):
        with pytest.raises(ResumeError, match=said):
            Start(base.parent).recover(mode=mode)
    with pytest.raises(ResumeError, match="has older memory of run bbbbbbbb"):
        Start(base.parent).recover(replace(NOTHING, version=Version(6, 9), lineage=7, run=B))
    own = replace(NOTHING, version=Version(5, 70), tier="process", lineage=6, run=A)
    assert Start(base.parent).recover(own).version == Version(5, 70), "its own SMP renews it"


def test_a_run_that_took_the_folder_while_this_one_was_restored_is_noticed(base):
    stored(base, 2, 60, A)
    slow = Start(base.parent)
    plan = slow.tier.recover(NOTHING, "auto", 0, segment(), 1)
    Start(base.parent, "faster").recover()
    with pytest.raises(ResumeError, match="in use by run aaaaaaaa on faster"):
        slow.tier.take(plan)


def test_a_run_that_was_silent_and_writes_again_while_this_one_was_restored_is_noticed(base, monkeypatch):
    monkeypatch.setattr(lease, "HOLD_SECONDS", 0.05)
    take(base, held_by(A, 2))
    stored(base, 2, 60, A)
    start = Start(base.parent)
    plan = start.tier.recover(NOTHING, "auto", 0, segment(), 1)
    lease.renew(base, held_by(A, 2, renewed=1.9e9))
    with pytest.raises(ResumeError, match="in use by run aaaaaaaa on elsewhere"):
        start.tier.take(plan)
    assert (found := lease.newest(base)) is not None and found.lineage == 2


def test_a_dead_holder_on_this_machine_that_was_alone_is_taken_over_at_once(base, capsys):
    dead = liveness.identified(os.getpid()).rpartition(" ")[0] + " 1"  # this pid, of a process before
    take(base, held_by(A, 5, alone=True, processes=(dead, dead)))
    stored(base, 5, 60, A)
    assert Start(base.parent).recover().run == A
    assert "waiting" not in capsys.readouterr().out


def test_a_job_whose_smp_alone_was_killed_is_not_taken_over_at_once(base, monkeypatch, capsys):
    """Given a job on one node whose SMP is dead; its ft-run, which lives, starts another one."""
    monkeypatch.setattr(lease, "HOLD_SECONDS", 0.05)
    lives = liveness.identified(os.getpid())
    stored(base, 5, 60, A)
    for processes in ((lives.rpartition(" ")[0] + " 1", lives), ()):  # (): written by a build that did not tell them
        take(base, held_by(A, 5, alone=True, processes=processes))
        Start(base.parent).recover()
        assert "seconds to see whether its last user lives" in capsys.readouterr().out
        for path in base.glob("lease-*"):
            path.unlink()


def test_a_lease_that_was_released_is_free_and_checkpoints_of_other_runs_than_its_own_are_refused_by_name(
    base, monkeypatch
):
    """Given a run that was started fresh where another one had checkpoints, and lost before it had one."""
    monkeypatch.setattr(lease, "HOLD_SECONDS", 0.05)
    stored(base, 3, 60, A)
    take(base, held_by(B, 4, released=True))
    said = "belong to another job or run .v3-60: run aaaaaaaa, not bbbbbbbb; --ftp-resume storage goes on from it"
    with pytest.raises(ResumeError, match=said):
        Start(base.parent).recover()
    assert Start(base.parent).recover(mode="storage").run == A
    assert Start(base.parent).recover(mode="fresh").run == DRAWN


def test_a_folder_that_may_only_be_read_is_restored_from_and_reported(base, monkeypatch):
    stored(base, 3, 60, A)

    def read_only(*arguments):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(lease, "take", read_only)
    start = Start(base.parent)
    assert start.recover().version == Version(3, 60)
    assert start.reported == [f"storage.failed: {base}: no lease can be written ([Errno 30] Read-only file system)"]


def test_the_frameworks_own_checkpoint_goes_on_as_the_run_that_had_the_folder(base):
    take(base, held_by(A, 5, released=True))
    assert Start(base.parent).recover(loaded=70).run == A
