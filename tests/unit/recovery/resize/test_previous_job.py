"""A resize with a spare that fails after its report: planned again as with a lost node, or refused. What was found is
restored once in a start."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_plugins.collective import Collective
from ft_plugins.config import Config
from ft_plugins.errors import FencedError, ProtocolError, ResumeError, SegmentError
from ft_plugins.events import Event, Events
from ft_plugins.model.topology import Topology
from ft_plugins.recovery import nodes as job_nodes
from ft_plugins.recovery.nodes import LinkedNodes, NodeTierConfig, Spare
from ft_plugins.recovery.resize.previous_job import PreviousJob
from ft_plugins.recovery.resize.previous_size import ResizePlan
from ft_plugins.smp.serve.job_file import refer
from ft_plugins.snapshot.segment.slots import Version
from ft_plugins.systems.reft import reft_nodes
from ft_plugins.systems.reft.failure_domains import JobNodeNames

from .protections import protection

V4 = Version(1, 4)
WHERE = ("10.0.0.2", 700)
FINGERPRINT = {"seed": 1, "world_size": 2}
PREVIOUS = {"seed": 1, "world_size": 4}
FIRST_ROUND = [(2, True), (3, False)]  # of two members and the spare: rank 2 is fetched, rank 3 decoded


def answer(rank, lineage=1, losses=1):
    """What the SMP says of the node that had this rank of four."""
    told = protection(rank, losses)
    return {
        "sizes": [[4, [[rank, [0, 0], lineage, 5, False, [[1, 4]]]]]],
        "fingerprints": [[4, PREVIOUS]],
        "parity": [[1, 4]],
        "committed": [1, 4],
        "position": rank,
        "plan": told.digest,
        "protection": refer(told)[0].block(),
        "released": 0,
        "lineage": lineage,
    }


class Nodes:
    """Members `ranks` of the previous job, all asked through this one rank; node 2 is a spare as long as it `lives`."""

    exchange = None
    digest = 0

    def __init__(self, members, refuses, lives_on, losses=1):
        """`refuses` says whether putting a rank together fails while the spare lives, by rank and whether it is fetched
        from it."""
        self.losses = losses
        self.members = {at: answer(rank, losses=losses) for at, rank in enumerate(members)}
        self.ranks = [[0]] * len(members)
        self.lives, self.lives_on, self.refuses = True, lives_on, refuses
        self.asked = []
        self.shared = []
        self.settled = []

    def ask(self, question):
        return [question(Client(self, at)) for at in self.members]

    def facts(self):
        return []

    def share_jobs(self, known):
        self.shared = [reference.job for reference, _ in known]

    def protection(self, reference):
        assert reference.job in self.shared
        return protection(reference.position, self.losses)

    def spares(self, previous, report):
        assert previous.nodes == ("n0", "n1", "n2", "n3")
        return [Spare("n2", WHERE, answer(2, 7, self.losses))] if self.lives else []

    def rebuild_previous(self, rank, plan, told, fingerprint, spare, spares):
        assert fingerprint == PREVIOUS, "a rank of the previous job: storage identifies it by that fingerprint"
        assert spare in (None, WHERE) and list(spares) in ([WHERE], [])
        assert max(plan.holders.values(), default=0) < len(self.members) + len(spares), "nobody else can be read"
        self.asked.append((rank, spare is not None))
        if self.lives and self.refuses(rank, spare is not None):
            self.lives = self.lives_on
            raise ProtocolError("it hung up")


class Client:
    def __init__(self, nodes, at):
        self.nodes, self.at = nodes, at

    def previous_sizes(self):
        return self.nodes.members[self.at]

    def settle(self, *told):
        self.nodes.settled.append(told)


class OneRank:
    """It speaks for every member."""

    rank, world_size = 0, 2

    def gather(self, payload):
        return [payload]


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(PreviousJob, "_verify", lambda *_: None)
    monkeypatch.setattr(PreviousJob, "_coordinates", lambda self, where, *_: dict.fromkeys(where, (0, 0)))
    return lambda nodes: PreviousJob(OneRank(), nodes, 1, Path("/nowhere/job/n"), lambda error: None)


def never(rank, fetched):
    return False


def test_what_the_spare_holds_is_fetched_and_what_is_lost_is_decoded_with_its_help(job):
    nodes = Nodes((0, 1), never, lives_on=True)
    previous = job(nodes)
    found = previous.plan_resize(FINGERPRINT)
    assert found is not None and found.version == V4 and nodes.asked == [(2, True), (3, False)]
    assert set(found.holders.values()) == {0, 1}, "all of it is on nodes of the job now"
    assert found.now == Version(8, 4), "newer than any lineage that the spare reports"
    previous.keep_only(found)
    assert len(nodes.settled) == 2, "each member keeps that state alone"


def test_a_spare_lost_before_its_part_was_fetched_is_a_lost_node(job):
    nodes = Nodes((0, 1, 3), lambda rank, fetched: fetched, lives_on=False)
    found = job(nodes).plan_resize(FINGERPRINT)
    assert found is not None and found.version == V4
    assert nodes.asked == [(2, True), (2, False)], "decoded from the parity of the others"


def test_one_lost_over_the_decoding_that_needs_it_is_more_than_parity_makes_up_for(job):
    for refuses in (lambda rank, fetched: rank == 3, lambda rank, fetched: fetched):
        nodes = Nodes((0, 1), refuses, lives_on=False)
        with pytest.raises(ResumeError, match="4 ranks is damaged .*RAIM5 makes up for 1.*previous number"):
            job(nodes).plan_resize(FINGERPRINT)
        assert not nodes.lives


def test_one_lost_over_the_decoding_is_done_without_where_parity_makes_up_for_both(job):
    nodes = Nodes((0, 1), lambda rank, fetched: rank == 3, lives_on=False, losses=2)
    found = job(nodes).plan_resize(FINGERPRINT)
    assert found is not None and found.version == V4
    assert nodes.asked == [(2, True), (3, False), (3, False)], "what was fetched in time stays"


def test_what_a_living_spare_cannot_hand_out_whole_is_decoded(job):
    nodes = Nodes((0, 1, 3), lambda rank, fetched: fetched, lives_on=True)
    found = job(nodes).plan_resize(FINGERPRINT)
    assert found is not None and nodes.asked == [(2, True), (2, False)] and nodes.lives


def test_what_was_decoded_from_a_corrupt_slot_is_decoded_again_without_it(job):
    """The spare's slot has a flipped bit: in one round it is found, and the lost rank is decoded from it."""
    nodes = Nodes((0, 1), lambda rank, fetched: fetched or nodes.asked == FIRST_ROUND, lives_on=True, losses=2)
    found = job(nodes).plan_resize(FINGERPRINT)
    assert found is not None and found.version == V4 and nodes.lives
    assert nodes.asked == [*FIRST_ROUND, (2, False), (3, False)]


def test_what_was_not_decoded_once_is_tried_again_and_given_up_the_second_time(job):
    nodes = Nodes((0, 1), lambda rank, fetched: nodes.asked == FIRST_ROUND, lives_on=True)
    found = job(nodes).plan_resize(FINGERPRINT)
    assert found is not None and found.version == V4 and nodes.asked == [*FIRST_ROUND, (3, False)]
    nodes = Nodes((0, 1), lambda rank, fetched: not fetched, lives_on=True)
    with pytest.raises(ResumeError, match="4 ranks is damaged"):
        job(nodes).plan_resize(FINGERPRINT)
    assert nodes.asked == [*FIRST_ROUND, (3, False)] and nodes.lives


def test_state_of_another_job_on_the_spare_is_refused(job, monkeypatch):
    nodes = Nodes((0, 1), never, lives_on=True)
    told = {**answer(2), "fingerprints": [[4, {"seed": 2}]]}
    monkeypatch.setattr(nodes, "spares", lambda *_: [Spare("n2", WHERE, told)])
    with pytest.raises(ResumeError, match="differs in more than its data-parallel size"):
        job(nodes).plan_resize(FINGERPRINT)


class Asking:
    """The SMP of n0, by which n1 cannot be read, n2 is fenced or answers, n3 answers."""

    fenced = False

    def __init__(self, run_dir):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def endpoint(self, address, secret_file, encrypt):
        return address, 1

    def spare(self, rank, token, size, name, where, timeout):
        if name == "n1":
            raise SegmentError("the job's fingerprint in it is damaged")
        if self.fenced:
            raise FencedError("token 1 was superseded by 2")
        return answer(int(name[1:]))


def test_a_spare_with_a_damaged_segment_is_a_lost_node_and_a_fence_the_end(monkeypatch):
    monkeypatch.setattr(job_nodes, "Client", Asking)
    config = NodeTierConfig(0, (), 1, 0.0, 5.0, "secret", Path("/nowhere/job/n0"), 1)
    nodes = LinkedNodes(Collective(interface="127.0.0.1"), ("n0",), config)
    reported = []
    found = nodes.spares(protection(0), lambda error: reported.append(str(error)))
    assert [spare.name for spare in found] == ["n2", "n3"] and reported == ["the job's fingerprint in it is damaged"]
    monkeypatch.setattr(Asking, "fenced", True)
    with pytest.raises(FencedError):
        nodes.spares(protection(0), lambda error: None)


def test_a_second_resume_of_a_start_does_not_read_the_previous_segments_again(monkeypatch, capsys):
    """They may have been removed since, and the slot that they filled is there."""
    refilled = []

    def refill(plan, *_):
        refilled.append(plan)
        if len(refilled) == 1:
            raise ResumeError("the states do not fit together")
        return 640

    monkeypatch.setattr(reft_nodes, "refill", refill)
    events, seen = Events("n0"), list[Event]()
    events.subscribe(seen.append)
    host = SimpleNamespace(rank=0, topology=lambda: Topology(1, 1, 1))
    config, names = Config.from_flags(["--reft"])[0], JobNodeNames(("n0",))
    nodes = reft_nodes.ReftNodes(host, config, Collective(), names, Path("/nowhere/job/n0"), 1, events)
    nodes._resize_plan = plan = ResizePlan(4, V4, Version(8, 4), dict.fromkeys(range(4), 0), {}, 5)
    segment = None
    with pytest.raises(ResumeError):
        nodes.restore_previous_size(segment, segment)
    nodes.restore_previous_size(segment, segment)
    nodes.restore_previous_size(segment, segment)
    assert refilled == [plan, plan], "one that failed has filled nothing"
    assert [event.name for event in seen] == ["state.resharded"]
    assert capsys.readouterr().out.count("iteration 4 of 4 ranks restored on 1 ranks") == 1
