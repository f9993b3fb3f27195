"""A session whose sharding group is cut into redundancy groups: real SMPs on emulated nodes, forked ranks, one a node.

Four nodes a to d; with groups of two, a and c protect each other, and so do b and d.
"""

import json
import time
from typing import Any

import pytest
import torch

from ft_plugins.config import Config
from ft_plugins.errors import FtError
from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.session import attach
from ft_plugins.smp.serve import job_file
from harness.plain_host import PlainHost

from .incarnation import context

Node = Any  # the fixture's class lives in conftest
PAIRS = {"group_nodes": 2}


def value_of(name, iteration):
    """The content of a tensor after an iteration."""
    seed = 1000 * iteration + sum(map(ord, name))
    return torch.randn(3000, generator=torch.Generator().manual_seed(seed))


class MixedHost(PlainHost):
    """`shared` is replicated over all ranks, the rest is the rank's own."""

    def inventory(self):
        """One item per tensor."""
        everyone = tuple(range(self._world_size))
        return Inventory.of(
            self.rank,
            [
                Item(
                    name,
                    "float32",
                    (3000,),
                    12000,
                    Role.PARAMETER,
                    everyone if name == "shared" else (self.rank,),
                    None,
                )
                for name in self.tensors()
            ],
        )


def _live(rank, world, run_dirs, token, until, options):
    """One incarnation of a rank. Returns where it resumed, whether with the right state, or the error."""
    given = dict(options)
    own, domains = given.pop("own", True), given.pop("domains", {})
    tensors = {name: value_of(name, 0) for name in ("shared", *([f"own{rank}"] if own else []))}
    done = {"iteration": 0}
    host = MixedHost(tensors, rank=rank, world_size=world, get_state=lambda: dict(done), set_state=done.update)
    name = run_dirs[rank].name
    block = {"node_name": name, **({"failure_domain": domains[name]} if name in domains else {}), **given}
    try:
        session = attach(host, Config.from_json(block), context(rank, world, run_dirs[rank], token))
        resumed = session.resume()
        right = all(torch.equal(tensor, value_of(name, resumed)) for name, tensor in tensors.items())
        for step in range(resumed + 1, until + 1):
            session.iteration_begin(step)
            torch.distributed.barrier()
            session.before_update(step)
            for each, tensor in tensors.items():
                tensor.copy_(value_of(each, step))
            session.after_update(step)
            done["iteration"] = step
            session.iteration_end(step)
        session.before_update(until + 1)
    except FtError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None, "resumed": resumed, "right": right}


class Job:
    """Nodes by name, as many ranks; each incarnation has the next fencing token."""

    def __init__(self, nodes, ranks, options):
        self.options = dict(options)
        self._nodes, self._ranks = nodes, ranks
        self.there = []
        self._token = 0

    def start(self, names):
        for name in names:
            node = self._nodes(name)
            node.start()
            self.there.append(node)

    def live(self, until, **changes):
        self._token += 1
        for node in self.there:
            while node.fence() < self._token:
                continue
        run_dirs = [node.run_dir for node in self.there]
        return self._ranks(_live, len(run_dirs), run_dirs, self._token, until, {**self.options, **changes})

    def committed(self, iteration):
        for node in self.there:
            deadline = time.monotonic() + 20
            while (node.status()["node_tier"]["committed"] or [0, 0])[1] != iteration:
                assert time.monotonic() < deadline, node.status()["node_tier"]
                time.sleep(0.01)

    def protected_at(self, iteration):
        """Train until there, resume, and wait until that is committed."""
        for _ in range(2):  # what is restored is committed as soon as all nodes agree
            assert [found["error"] for found in self.live(iteration)] == [None] * len(self.there)
        self.committed(iteration)

    def lose(self, *names):
        """A fresh node for each, in its place."""
        for place, node in enumerate(self.there):
            if node.name in names:
                node.end()
                self.there[place] = self._nodes(f"s{node.name}")
                self.there[place].start()

    def record(self):
        """What the SMPs protect; the same on all nodes but for the position."""
        referred = [(node.run_dir, job_file.read_record(node.run_dir)[0]) for node in self.there]
        assert len({reference.job for _, reference in referred}) == 1
        blocks = [job_file.read(run_dir, reference).block() for run_dir, reference in referred]
        (first, *rest) = json.loads(json.dumps(blocks))
        assert all(other["groups"] == first["groups"] and other["domains"] == first["domains"] for other in rest)
        return dict(first)


@pytest.fixture
def job(nodes, ranks, tmp_path):
    """A job on the nodes a to d, or fewer."""
    secret = tmp_path / "secret"
    secret.write_text("known to the nodes of this job")
    secret.chmod(0o600)

    def made(names="abcd", **options):
        one = Job(nodes, ranks, {"secret_file": str(secret), **options})
        one.start(names)
        return one

    return made


def resumed_rightly(found, iteration):
    assert [each["error"] for each in found] == [None] * len(found)
    assert {(each["resumed"], each["right"]) for each in found} == {(iteration, True)}


@pytest.mark.parametrize(("own", "lost"), [(True, "ab"), (False, "ad"), (False, "cd")])
def test_nodes_of_different_groups_that_are_lost_together_are_rebuilt(job, own, lost):
    one = job(reft=PAIRS, own=own)
    one.protected_at(4)
    assert one.record()["groups"] == [[0, 2], [1, 3]] and one.record()["domains"] == []
    one.lose(*lost)
    resumed_rightly(one.live(4), 4)
    one.committed(4)
    rebuilt = [node.events("slot.rebuilt") for node in one.there]
    assert [len(events) for events in rebuilt] == [int(node.name.startswith("s")) for node in one.there]
    assert all(event.fields["decoded"] for events in rebuilt for event in events)


def test_two_of_one_group_are_one_too_many_and_nothing_starts_from_the_beginning(job):
    one = job(reft=PAIRS)
    one.protected_at(4)
    one.lose("b", "d")
    found = one.live(6)
    assert all("ResumeError" in str(each["error"]) for each in found)
    assert "the parts of ranks 1, 3 are gone with 2 nodes that protect each other" in found[0]["error"]
    assert "RAIM5 makes up for 1" in found[0]["error"]


def test_by_default_four_nodes_are_one_group_and_two_of_them_one_too_many(job):
    one = job(reft={})
    one.protected_at(4)
    assert one.record()["groups"] == [[0, 1, 2, 3]]
    one.lose("a", "b")
    assert "ResumeError" in str(one.live(6)[0]["error"])


RACKS = {"a": "x", "b": "x", "c": "y", "d": "y", "sa": "x", "sb": "x"}


def test_a_whole_failure_domain_is_survived_where_the_nodes_name_theirs(job, capfd):
    one = job(reft={}, domains=RACKS)
    one.protected_at(4)
    record = one.record()
    assert record["groups"] == [[0, 2], [1, 3]] and record["domains"] == ["x", "x", "y", "y"]
    assert "failure domain" not in capfd.readouterr().out
    one.lose("a", "b")
    resumed_rightly(one.live(4), 4)


def test_a_domain_that_no_cut_takes_apart_is_named_at_start(job, capfd):
    one = job(reft={}, domains={"a": "x", "b": "x", "d": "x"})
    one.live(1)
    assert one.record()["groups"] == [[0, 1, 2, 3]]
    out = capfd.readouterr().out
    said = (
        "the loss of failure domain x is not survived: nodes a, b, d are in one redundancy group, RAIM5 makes up for 1"
    )
    assert said in " ".join(out.split())


def test_a_substitute_in_another_domain_takes_the_place_of_the_lost_node_as_it_was(job, capfd):
    one = job(reft={}, domains={**RACKS, "sa": "y"})
    one.protected_at(4)
    before = one.record()
    one.lose("a")
    capfd.readouterr()
    resumed_rightly(one.live(4), 4)
    one.committed(4)
    after = one.record()
    assert (after["groups"], after["domains"]) == (before["groups"], before["domains"])
    out = " ".join(capfd.readouterr().out.split())
    assert "redundancy groups stay as they are for the snapshots in memory" in out and "sa (y, so far x)" in out
    assert "the loss of failure domain y is not survived: nodes sa, c are in one redundancy group" in out
    one.lose("b")  # the record of the substitute counts as those of the others
    resumed_rightly(one.live(4), 4)
    found = one.live(1, resume="fresh")
    assert found[0]["error"] is None and one.record()["domains"] == ["y", "x", "y", "y"]
    assert one.record()["groups"] == [[0, 1, 2, 3]], "three of four in one rack cannot be apart"


def test_domains_that_are_given_later_or_no_longer_wait_for_a_fresh_start(job):
    one = job(reft={})
    one.protected_at(2)
    resumed_rightly(one.live(2, domains=RACKS), 2)
    assert one.record()["domains"] == [] and one.record()["groups"] == [[0, 1, 2, 3]]
    one.live(2, domains=RACKS, resume="fresh")
    assert one.record()["groups"] == [[0, 2], [1, 3]]
    resumed_rightly(one.live(2), 2)
    assert one.record()["domains"] == ["x", "x", "y", "y"]


def test_a_longer_interval_resumes_from_slots_of_the_shorter_one_and_not_the_other_way(job):
    """As `ft-plugins plan interval` advises. A shorter one needs a slot more, or a version would be overwritten."""
    one = job("ab", reft={"interval": 1})
    one.protected_at(4)
    resumed_rightly(one.live(4, reft={"interval": 2}), 4)
    other = job("cd", reft={"interval": 2})
    other.protected_at(4)
    (error, *_) = [found["error"] for found in other.live(6, reft={"interval": 1})]
    assert "another layout (stored -> now: free: 2 -> 3" in error and "'ft-plugins end JOB'" in error
    resumed_rightly(other.live(4, reft={"interval": 2}), 4)


def test_another_group_size_is_another_layout_of_replicated_state(job):
    one = job(reft=PAIRS, own=False)
    one.protected_at(2)
    found = one.live(4, reft={})
    assert "another layout" in str(found[0]["error"]) and "ResumeError" in str(found[0]["error"])
    resumed_rightly(one.live(4), 2)


def test_a_job_of_fewer_nodes_resumes_from_groups_of_the_previous_size(job):
    one = job(reft=PAIRS, own=False)
    one.protected_at(4)
    for node in one.there[:2]:  # of different groups
        node.end()
    one.there = one.there[2:]
    resumed_rightly(one.live(4), 4)
    one.live(6)
    assert one.record()["groups"] == [[0, 1]]
