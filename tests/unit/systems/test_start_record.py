"""What the ranks of a node note of their start, and what the first of them reports."""

import functools

from ft_plugins.base import stamps
from ft_plugins.config import LaunchContext
from ft_plugins.events import Event, Events
from ft_plugins.systems.start_record import RankStart, StartRecord, last_of


def start(rank, *clock, grouped=0.5, used=1.0):
    names = stamps.STEPS if len(clock) == 4 else ("began", "built", "restored")
    processor = {name: used * (number + 1) for number, name in enumerate(names)}
    return RankStart(7, rank, dict(zip(names, clock, strict=True)), processor, grouped)


def test_each_step_is_that_of_the_last_rank_and_groups_are_those_of_the_rank_that_the_others_waited_for():
    facts = last_of([start(0, 1.0, 5.0, 6.0, 9.0, grouped=0.25), start(1, 2.0, 3.0, 7.0, 8.0, grouped=2.5)])
    assert [facts[step] for step in stamps.STEPS] == [2.0, 5.0, 7.0, 9.0]
    assert (facts["grouped"], facts["count"]) == (0.25, 2)
    assert facts["processor"] == {"began": 2.0, "joining": 2.0, "built": 2.0, "restored": 2.0}


def test_ranks_without_process_groups_have_no_such_step():
    facts = last_of([start(0, 1.0, 6.0, 9.0)])
    assert (facts["joining"], facts["grouped"]) == (None, 0.0)
    assert facts["processor"] == {"began": 1.0, "built": 1.0, "restored": 1.0}


def context(run_dir, rank, token=7):
    return LaunchContext(None, run_dir, token, None, rank, rank, 2, 2, 0, 1)


class Seen(list[Event]):
    def events(self):
        events = Events("n0")
        events.subscribe(self.append)
        return events


def test_one_event_a_node_and_start_describes_all_its_ranks_and_leaves_no_file(tmp_path):
    seen = Seen()
    records = [StartRecord(context(tmp_path, rank), seen.events()) for rank in (1, 0)]
    for record in records:
        record.restored(lineage=3)
    with (tmp_path / "starts").open("a") as file:
        file.write('[7, "no rank", {}, {}, 0]\n{"token": 7}\n[6, 1, {}, {}, 0.0]\nhalf')
    for record in records:
        record.completed(12)
    [event] = seen
    assert (event.name, event.fields["count"], event.fields["iteration"]) == ("ranks.resumed", 2, 12)
    assert (event.fields["lineage"], event.fields["token"]) == (3, 7)
    assert event.type is not None and not event.type.problem(event.fields)
    assert list(tmp_path.iterdir()) == []


def test_lines_of_an_earlier_start_do_not_count(tmp_path):
    seen = Seen()
    StartRecord(context(tmp_path, 1, token=6), seen.events()).restored(2)
    now = StartRecord(context(tmp_path, 0), seen.events())
    now.restored(3)
    now.completed(5)
    assert [event.fields["count"] for event in seen] == [1]


def test_without_a_run_directory_or_with_a_lost_file_nothing_is_reported_and_nothing_fails(tmp_path):
    seen = Seen()
    for folder in (None, tmp_path / "gone"):
        record = StartRecord(context(folder, 0), seen.events())
        record.restored(1)
        record.completed(2)
    assert seen == []


class Module:
    """What torch.distributed offers."""

    def __init__(self, calls):
        @functools.wraps(Module.__init__)
        def init_process_group(*args):
            calls.append("init")
            self.new_group()  # what torch makes inside counts once
            return "made"

        self.init_process_group = init_process_group
        self.new_group = functools.partial(calls.append, "new")


def test_functions_that_make_groups_do_what_they_did_and_are_measured_until_the_model_is_built(monkeypatch):
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr(stamps.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(stamps, "_taken", stamps.Stamps())
    calls = []
    module = Module(calls)
    stamps.follow_groups(module)
    stamps.afterwards(lambda: calls.append("completed"))
    stamps.begin()  # 0
    assert module.init_process_group() == "made"  # joining 1, from 2 to 3
    assert stamps.taken().clock == {"began": 0.0, "joining": 1.0}
    assert stamps.taken().grouped == 1.0
    module.new_group()  # from 4 to 5
    stamps.pass_step("built")
    module.new_group()
    assert stamps.taken().grouped == 2.0
    stamps.pass_step("completed")
    stamps.pass_step("completed")
    assert calls == ["init", "new", "new", "new", "completed"]


def test_what_a_process_used_while_it_stood_by_does_not_count(monkeypatch):
    used = iter([7.0, 7.0, 7.5])
    monkeypatch.setattr(stamps.time, "process_time", lambda: next(used))
    monkeypatch.setattr(stamps, "_taken", stamps.Stamps())
    stamps.begin()
    stamps.pass_step("built")
    assert stamps.taken().processor == {"began": 0.0, "built": 0.5}
