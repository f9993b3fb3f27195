"""All ranks have the same configuration, or the difference is named; equal ones are compared by a digest. The memory of
a node is checked whole before any of it is claimed."""

from contextlib import contextmanager
from types import SimpleNamespace

import msgpack
import pytest

from ft_plugins.config import Config, launch_context
from ft_plugins.errors import ConfigError
from ft_plugins.events import Events
from ft_plugins.snapshot.capture.layout import Layout
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.systems.reft import claim
from ft_plugins.systems.reft.claim import join_ranks, require_one_job


class Ranks:
    """The collective of rank 0; the other ranks have `others`, and send what that rank would."""

    rank = 0

    def __init__(self, others):
        self.world_size, self.others, self.sent = 1 + len(others), others, list[bytes]()

    def gather(self, payload):
        self.sent.append(payload)
        return [payload, *(self._of(config, len(self.sent)) for config in self.others)]

    def _of(self, config, number):
        other = Ranks([])
        with pytest.raises(StopIteration):
            require_one_job(host(1), config, Stopping(other, number))
        return other.sent[-1]

    @contextmanager
    def agreement(self):
        yield


class Stopping:
    """Records what is sent, and stops at the n-th."""

    def __init__(self, into, number):
        self.world_size, self.rank, self.into, self.number = 1, 1, into, number
        self.agreement = into.agreement

    def gather(self, payload):
        self.into.sent.append(payload)
        if len(self.into.sent) == self.number:
            raise StopIteration
        return [payload, b"another"]


def host(world_size):
    return SimpleNamespace(rank=0, topology=lambda: SimpleNamespace(world_size=world_size))


def config(interval, node="a"):
    return Config.from_json({"reft": {"interval": interval}, "node_name": node})


def test_equal_configurations_are_eight_bytes_of_each_rank():
    ranks = Ranks([config(3, "b"), config(3, "c")])
    require_one_job(host(3), config(3), ranks)
    assert [len(payload) for payload in ranks.sent] == [8], "names of nodes may differ"


def test_a_difference_is_named():
    ranks = Ranks([config(3), config(4)])
    with pytest.raises(ConfigError, match="reft of rank 2 is .*'interval': 4"):
        require_one_job(host(3), config(3), ranks)
    assert len(ranks.sent) == 2 and msgpack.unpackb(ranks.sent[1])["reft"]["interval"] == 3


def _joins(rank, world, files):
    """What `rank`, which is given `files[rank]`, says of it; '' if it takes part."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    context = launch_context({name: str(value) for name, value in place.items()})
    try:
        join_ranks(Config(secret_file=files[rank] or None), context, Events()).close()
    except ConfigError as error:
        return str(error), error.echo
    return "", False


@pytest.mark.parametrize("absent", [[0, 1, 2], [2], [0]])
def test_a_secret_that_a_rank_cannot_read_is_refused_on_all_by_name_wherever_it_is(ranks, tmp_path, absent):
    (secret := tmp_path / "secret").write_bytes(b"sixteen bytes or more")
    secret.chmod(0o600)
    assert ranks(_joins, 3, [str(secret)] * 3) == [("", False)] * 3
    found = ranks(_joins, 3, [str(tmp_path / "absent") if rank in absent else str(secret) for rank in range(3)])
    assert [echo for _, echo in found] == [rank != absent[0] for rank in range(3)]
    for words, _ in found:
        assert words.startswith(f"rank {absent[0]}: --ftp-secret-file {tmp_path}/absent: cannot be read (No such file")
        assert "put the same file on every node" in words


def test_a_secret_that_only_some_ranks_are_given_and_none_can_read_is_refused_too(ranks):
    found = ranks(_joins, 2, ["", "/absent"])
    assert [words[:38] for words, _ in found] == ["rank 1: --ftp-secret-file /absent: can"] * 2
    assert ranks(_joins, 2, ["", ""]) == [("", False)] * 2, "without one nothing is asked for"


def test_a_job_of_one_rank_is_refused_too():
    with pytest.raises(ConfigError, match="^rank 0: --ftp-secret-file /absent: cannot be read"):
        join_ranks(Config(secret_file="/absent"), launch_context({}), Events())


# ------------------------------------------------------------------------------------------------ memory of a node

PAGES = Shape(nbytes=100, small_nbytes=10, buckets=1, layout=1)


class OneNode:
    """The collective of rank 0 of a node with `count` ranks, all of which claim the same."""

    rank = 0

    def __init__(self, count):
        self.count = count

    def gather(self, payload):
        return [payload] * self.count


def claiming(claimed=False, store=0, leads=True):
    """A `Reft` of which only the claim is of interest."""
    layout = Layout(0, (), (), (), 100)
    nodes = SimpleNamespace(leads=leads, losses=1 if store else 0, store_bytes=lambda ranks, at: [store for _ in at])
    return SimpleNamespace(claimed=claimed, plan=SimpleNamespace(shape=PAGES, layout=layout), nodes=nodes)


def checked(monkeypatch, reft, flags=("--reft",)):
    """What is checked at once: bytes, whose, and how the job could claim less."""
    calls = []
    monkeypatch.setattr(claim, "check_room", lambda nbytes, claim, smaller: calls.append((nbytes, claim, smaller)))
    chosen, rest = Config.from_flags(list(flags))
    assert not rest
    ranks = OneNode(8)
    claim._check_room(reft, chosen, ranks, ["a"] * 8)
    return calls


def test_the_claim_of_all_ranks_of_a_node_and_of_its_smp_is_checked_at_once(monkeypatch):
    """So rank 7 is not the one to miss what seven others have claimed."""
    assert checked(monkeypatch, claiming()) == [(8 * PAGES.total, "node a: protection of 8 ranks", "")]
    ((nbytes, text, smaller),) = checked(monkeypatch, claiming(store=5000), ("--reft", "--reft-redundancy", "raim6"))
    assert nbytes == 8 * PAGES.total + 5000
    assert text == "node a: protection of 8 ranks, with parity or copies of other nodes,"
    ways = ("larger redundancy groups (--reft-group-nodes", "--reft-redundancy raim5", "--reft-redundancy none (a lost")
    assert all(way in smaller for way in ways)


@pytest.mark.parametrize(
    "more, advised",
    [
        ((), False),
        (("--reft-slots", "3"), True),
        (("--reft-slots", "2"), False),
        (("--reft-slots", "5", "--reft-checkpoint-dir", "/c"), True),
    ],
)
def test_slots_that_are_claimed_when_needed_are_advised_where_more_are_claimed_at_start(monkeypatch, more, advised):
    ((_, _, smaller),) = checked(monkeypatch, claiming(store=5000), ("--reft", "--reft-redundancy", "raim5", *more))
    assert ("no --reft-slots (2 of the" in smaller) == advised


def test_one_rank_checks_for_its_node_and_nothing_that_is_claimed_already(monkeypatch):
    assert checked(monkeypatch, claiming(leads=False)) == []
    assert checked(monkeypatch, claiming(claimed=True, store=5000)) == []
