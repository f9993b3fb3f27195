"""Which of memory, our checkpoints and the framework's own is restored; what hangs, and what differs, is told."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ft_plugins.base.files import write_digested
from ft_plugins.base.intake import changes, within
from ft_plugins.collective import Collective
from ft_plugins.errors import ResumeError
from ft_plugins.events import catalogue
from ft_plugins.recovery.recovery_plan import RecoveryPlan
from ft_plugins.recovery.storage import StorageTier, with_storage
from ft_plugins.snapshot.capture.retention import StoredCheckpoint
from ft_plugins.snapshot.checkpoint import checkpoint, persist
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.segment.slots import Mark, SlotState, Version

S = Version(1, 40)
MEMORY = RecoveryPlan(Version(2, 70), "process", 3, 71, 1, "newest that all ranks hold")
NOTHING = RecoveryPlan(None, "none", 1, 0, 0, "no version was captured before")
ORIGIN = Origin("", 1, {"layers": 4})
BROKEN = RecoveryPlan(None, "none", 3, 50, 50, "rank 1 holds no version", state_lost=True)


def segment_of(*slots):
    """What the storage tier itself uses of a segment; `dirtied` has what it made DIRTY."""
    dirtied = []
    return SimpleNamespace(
        fingerprint=ORIGIN.fingerprint, slots=lambda: slots, dirtied=dirtied,
        dirty=lambda index, version, token: dirtied.append(index),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "mode", "loaded", "later", "expected"),
    [
        (MEMORY, "auto", 0, False, ("process", 70)),
        (MEMORY, "auto", 80, False, ("storage", None)),  # the framework's own: the larger iteration wins
        (MEMORY, "auto", 0, True, ("storage", 40)),  # the job has lived on elsewhere since
        (MEMORY, "storage", 0, False, ("storage", 40)),
        (MEMORY, "memory", 0, True, ("process", 70)),
        (MEMORY, "fresh", 0, False, ("none", None)),
        (NOTHING, "auto", 0, False, ("storage", 40)),
        (NOTHING, "auto", 40, False, ("storage", 40)),
        (NOTHING, "auto", 41, False, ("storage", None)),
        (NOTHING, "storage", 41, False, ("storage", None)),
        (NOTHING, "fresh", 0, False, ("none", None)),
        (BROKEN, "auto", 0, False, ("storage", 40)),
        (MEMORY, "before:71", 0, False, ("process", 70)),  # the newest of both
        (MEMORY, "before:71", 0, True, ("process", 70)),
        (replace(MEMORY, version=Version(1, 30)), "before:71", 0, False, ("storage", 40)),
        (NOTHING, "before:41", 0, False, ("storage", 40)),
        (NOTHING, "before:50", 41, False, ("storage", None)),
    ],
)
def test_the_source_is_memory_then_the_larger_iteration_on_disk_or_what_was_asked_for(
    found, mode, loaded, later, expected
):
    plan = with_storage(found, mode, loaded, S, later)
    assert (plan.tier, plan.version.iteration if plan.version else None) == expected
    if plan.version == S:
        assert plan.lineage == found.lineage and plan.lost == plan.completed - 40 and not plan.state_lost
        assert plan.completed == max(found.completed, 40)


def test_a_checkpoint_that_is_taken_is_named_with_what_memory_could_not():
    assert with_storage(BROKEN, "auto", 0, S, False).table() == (
        "recovery: iteration 40 of lineage 1 from the storage tier (rank 1 holds no version); "
        "every rank had completed 50, 10 lost; iteration 41 is computed next, again if it was logged before; lineage 3"
    )


def test_what_is_known_of_its_replicas_goes_into_the_plan_and_so_into_the_slot_of_every_rank():
    plan = with_storage(BROKEN, "auto", 0, S, False, mark=Mark.CERTIFIED)
    assert plan.mark is Mark.CERTIFIED and "(rank 1 holds no version), certified;" in plan.table()
    assert with_storage(BROKEN, "auto", 0, S, False).mark is Mark.NONE


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (MEMORY, Version(2, 60)),  # outdated: what lies in storage is of a later lineage
        (replace(MEMORY, mark=Mark.CERTIFIED), Version(2, 70)),  # and newer than what is certified in storage
        (NOTHING, Version(2, 60)),
    ],
)
def test_a_certified_checkpoint_is_tried_before_newer_ones_of_which_it_is_not_known(
    tmp_path, monkeypatch, memory, expected
):
    stored = [
        StoredCheckpoint(Version(2, 60), "v2-60", True, ORIGIN.fingerprint_digest, certified=True),
        StoredCheckpoint(Version(3, 90), "v3-90", True, ORIGIN.fingerprint_digest, certified=False),
    ]
    monkeypatch.setattr(checkpoint, "listing", lambda base, passed_over: stored)
    read = []
    monkeypatch.setattr(persist, "read_rank", lambda folder, *_: read.append(folder.name) or 0)
    tier = StorageTier(tmp_path, "job", Collective(), lambda name, reason: None)
    plan = tier.recover(memory, "auto", 0, segment_of(), 1)
    assert plan.version == expected and plan.mark is Mark.CERTIFIED
    assert read == (["v2-60"] if expected == Version(2, 60) else [])
    assert plan.lineage == 4, "newer than all that lies in storage"


AGREED = replace(MEMORY, mark=Mark.CERTIFIED)


@pytest.mark.parametrize(
    ("memory", "checkpoints", "expected"),
    [
        (MEMORY, {"v2-71": False}, "v2-71"),  # memory has lost it, and has lost the iteration after 71
        (MEMORY, {"v2-70": False}, "memory"),
        (MEMORY, {"v1-90": False}, "memory"),  # void since lineage 2 was opened
        (replace(MEMORY, version=Version(1, 60)), {"v2-71": False, "v1-90": False}, "v2-71"),
        (AGREED, {"v2-71": False}, "memory"),
        (AGREED, {"v2-71": True}, "v2-71"),
        (AGREED, {"v3-65": False}, "v3-65"),
        (replace(MEMORY, doubted=(71, 80)), {"v2-71": False}, "memory"),  # an audit found it wrong
        (replace(MEMORY, agreed=70), {"v2-72": False, "v2-71": False}, "memory"),
    ],
)
def test_the_newest_version_of_memory_and_storage_is_restored(tmp_path, monkeypatch, memory, checkpoints, expected):
    stored = [
        StoredCheckpoint(Version(*map(int, name[1:].split("-"))), name, True, ORIGIN.fingerprint_digest, certified=good)
        for name, good in checkpoints.items()
    ]
    monkeypatch.setattr(checkpoint, "listing", lambda base, passed_over: stored)
    monkeypatch.setattr(persist, "read_rank", lambda folder, *_: 0)
    tier = StorageTier(tmp_path, "job", Collective(), lambda name, reason: None)
    plan = tier.recover(memory, "auto", 0, segment_of(), 1)
    assert plan.version is not None and memory.version is not None
    assert (plan.tier == "process", plan.version == memory.version) == ((expected == "memory",) * 2)
    assert expected in ("memory", f"v{plan.version.lineage}-{plan.version.iteration}")
    assert (plan.at_least, plan.completed) == ((True, 65) if expected == "v3-65" else (False, 71))
    why = f"(newer than iteration {memory.version.iteration} of lineage {memory.version.lineage} in memory"
    assert plan.tier == "process" or why in plan.table()


def test_an_older_checkpoint_of_this_size_is_not_taken_silently_where_another_size_has_gone_on():
    newer, older = Version(3, 500), Version(1, 30)
    refusal = "version 500 .*another data-parallel size.*iteration 40 with --ftp-resume storage"
    with pytest.raises(ResumeError, match=refusal):
        with_storage(NOTHING, "auto", 0, S, True, newer)
    assert with_storage(NOTHING, "storage", 0, S, True, newer).version == S
    assert with_storage(NOTHING, "auto", 0, S, True, older).version == S
    assert with_storage(MEMORY, "auto", 0, S, False, newer).version == MEMORY.version


def test_without_a_checkpoint_everything_is_as_without_storage():
    assert with_storage(MEMORY, "auto", 0, None, False) == MEMORY
    with pytest.raises(ResumeError, match="rank 1 holds no version"):
        with_storage(BROKEN, "auto", 0, None, False)
    with pytest.raises(ResumeError, match="no checkpoint in --reft-checkpoint-dir"):
        with_storage(MEMORY, "storage", 0, None, False)


def test_a_storage_that_hangs_is_out_of_reach_after_its_time_and_an_error_is_passed_on():
    never = threading.Event()
    with pytest.raises(TimeoutError, match="did not answer within"):
        within(0.05, never.wait)
    never.set()
    with pytest.raises(OSError, match="gone"):
        within(5, lambda: (_ for _ in ()).throw(OSError("gone")))
    assert within(5, lambda: 7) == 7


def test_two_fingerprints_differ_by_name():
    assert changes({"layers": 4, "order": [1, 2]}, {"layers": 5, "order": (1, 2), "new": True}) == (
        "layers: 4 -> 5, new: None -> True"
    )


def three_stored():
    names = ("v1-40", "v2-60", "v2-80")
    found = {name: Version(*map(int, name[1:].split("-"))) for name in names}
    return [StoredCheckpoint(version, name, True, ORIGIN.fingerprint_digest) for name, version in found.items()]


@pytest.mark.parametrize(
    ("memory", "mode", "expected"),
    [
        (NOTHING, "before:80", Version(2, 60)),
        (NOTHING, "before:60", Version(1, 40)),
        (replace(MEMORY, version=Version(2, 70)), "before:80", Version(2, 70)),
        (replace(MEMORY, version=Version(2, 50)), "before:80", Version(2, 60)),
        (replace(MEMORY, version=Version(2, 50)), "before:60", Version(2, 50)),
    ],
)
def test_the_newest_version_older_than_an_iteration_is_taken_from_memory_or_storage(
    tmp_path, monkeypatch, memory, mode, expected
):
    monkeypatch.setattr(checkpoint, "listing", lambda base, passed_over: three_stored())
    read = []
    monkeypatch.setattr(persist, "read_rank", lambda folder, *_: read.append(folder.name) or 0)
    tier = StorageTier(tmp_path, "job", Collective(), lambda name, reason: None)
    plan = tier.recover(memory, mode, 0, segment_of(), 1)
    assert (plan.version, plan.reason, plan.lineage) == (expected, f"--ftp-resume {mode}", 3)
    assert read == ([f"v{expected.lineage}-{expected.iteration}"] if plan.tier == "storage" else [])


def test_from_memory_the_job_opens_a_lineage_that_storage_does_not_have(tmp_path, monkeypatch):
    """The job has continued elsewhere since; its checkpoints of the same versions are not this run's."""
    stored = [StoredCheckpoint(Version(7, 90), "v7-90", True, ORIGIN.fingerprint_digest)]
    monkeypatch.setattr(checkpoint, "listing", lambda base, passed_over: stored)
    tier = StorageTier(tmp_path, "job", Collective(), lambda kind, reason: None)
    plan = tier.recover(MEMORY, "memory", 0, segment_of(), 1)
    assert (plan.tier, plan.version, plan.lineage) == ("process", MEMORY.version, 8)


def test_storage_that_cannot_be_reached_does_not_end_a_start_from_memory(tmp_path, monkeypatch):
    def unreachable(base, passed_over):
        raise OSError(5, "gone")

    monkeypatch.setattr(checkpoint, "listing", unreachable)
    reported = []
    tier = StorageTier(tmp_path, "job", Collective(), lambda kind, reason: reported.append((kind, reason)))
    assert tier.recover(MEMORY, "memory", 0, segment_of(), 1) == MEMORY
    assert reported == [(catalogue.STORAGE_FAILED, "gone")]


class OtherRankFails(Collective):
    """Of two ranks; the other one can read no checkpoint."""

    def gather(self, value):
        return [value, b""]


@pytest.mark.parametrize("held", [False, True])
def test_a_checkpoint_that_another_rank_cannot_read_costs_no_version_in_memory(tmp_path, monkeypatch, held):
    """What it was read into is free for the next one, unless that version was in memory before."""
    monkeypatch.setattr(checkpoint, "listing", lambda base, passed_over: three_stored())
    monkeypatch.setattr(persist, "read_rank", lambda *_: 3)
    tier = StorageTier(tmp_path, "job", OtherRankFails(), lambda kind, reason: None)
    clean = [SimpleNamespace(state=SlotState.CLEAN, version=Version(2, 80))] if held else []
    segment = segment_of(*clean)
    with pytest.raises(ResumeError, match="every checkpoint of this job"):
        tier.recover(NOTHING, "auto", 0, segment, 1)
    assert segment.dirtied == [3] * (2 if held else 3)


def test_where_nothing_is_older_what_there_is_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "listing", lambda base, passed_over: three_stored())
    tier = StorageTier(tmp_path, "job", Collective(), lambda name, reason: None)
    segment = segment_of()
    with pytest.raises(ResumeError, match="no older version.*in memory: none; checkpoints: v1-40, v2-60, v2-80; name"):
        tier.recover(NOTHING, "before:40", 0, segment, 1)
    with pytest.raises(ResumeError, match="loaded its own checkpoint of iteration 40, which every restart"):
        tier.recover(NOTHING, "before:40", 40, segment, 1)


def test_checkpoints_of_an_earlier_format_are_refused_by_what_to_do_and_are_no_fresh_start(tmp_path):
    folder = tmp_path / "job" / "v1-40"
    folder.mkdir(parents=True)
    write_digested(folder / "manifest.json", {"format": "ft_plugins checkpoint 1"})
    told = []
    tier = StorageTier(tmp_path, "job", Collective(), lambda kind, reason: told.append(reason))
    with pytest.raises(ResumeError, match="the newest: .*v1-40: .*found 'ft_plugins checkpoint 1': resume or export"):
        tier.recover(NOTHING, "auto", 0, segment_of(), 1)
    assert len(told) == 1 and "resume or export it with the ft_plugins that wrote it" in told[0]


def test_what_the_job_went_back_past_is_renamed_and_found_no_more(tmp_path):
    for name in ("v1-40", "v2-60", "v2-80", "v2-90.partial", "v5-90"):
        (tmp_path / name).mkdir()
    assert sorted(checkpoint.void(tmp_path, 40, 5)) == ["v2-60.void", "v2-80.void", "v2-90.partial.void"]
    ignored = []
    left = checkpoint.listing(tmp_path, ignored.append)
    assert sorted(each.name for each in left) == ["v1-40", "v5-90"] and not ignored
    assert checkpoint.void(tmp_path, 40, 5) == []


def test_a_checkpoint_is_renamed_again_when_the_job_goes_back_a_second_time(tmp_path):
    """Renamed ones are not read, so a later lineage may have the number of theirs, and reach the same iteration."""
    for renamed in ("v2-60.void", "v2-60.void.2", "v2-60.void.3"):
        (tmp_path / "v2-60").mkdir()
        (tmp_path / "v2-60" / "manifest.json").touch()
        assert checkpoint.void(tmp_path, 40, 5) == [renamed] and (tmp_path / renamed).is_dir()
    assert checkpoint.listing(tmp_path) == ()


def test_all_folders_of_a_version_that_the_job_went_back_past_are_renamed(tmp_path):
    for name in ("v2-60", "v2-60.partial"):
        (tmp_path / name).mkdir()
    assert checkpoint.void(tmp_path, 40, 5) == ["v2-60.void", "v2-60.partial.void"]
    assert checkpoint.listing(tmp_path) == ()


@pytest.mark.parametrize(("mark", "agreed", "tier"), [
    (Mark.CERTIFIED, 40, Version(1, 40)), (Mark.NONE, 40, None), (Mark.CERTIFIED, 60, None),
    (Mark.CERTIFIED, None, None),
])  # fmt: skip
def test_a_certified_checkpoint_is_restored_before_a_newer_one_of_the_framework_that_no_audit_vouches_for(
    mark, agreed, tier
):
    memory = replace(NOTHING, completed=55, agreed=agreed)
    plan = with_storage(memory, "auto", 50, S, False, mark=mark)
    assert (plan.version, plan.refused) == (tier, 50 if tier else 0)
