"""What belongs to the whole job is in one file of a node, and messages name it: they stay short at any size."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import ProtocolError
from ft_plugins.model.topology import Topology
from ft_plugins.redundancy.grouping import redundancy_groups
from ft_plugins.redundancy.sections import Extent
from ft_plugins.smp.serve import job_file
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Version

V4 = Version(1, 4)
LARGEST_MESSAGE = 4096  # bytes, where the bound is a million


def protection(ranks=4, per_node=1):
    """Nodes with names of 48 characters."""
    topology = Topology(tp=1, pp=1, dp=ranks)
    nodes = tuple(f"{rank // per_node:048}" for rank in range(ranks))
    groups = redundancy_groups(nodes, tuple(topology.sharding_groups().values()), 8, 1)
    count = ranks // per_node
    return Protection(
        lineage=3, base=V4, nodes=nodes, groups=groups, shapes=(Shape(640, 64, 1, (1 << 64) - 1),) * ranks, losses=1,
        position=count - 1, endpoints=tuple((f"10.1.{at // 250}.{at % 250}", 40000 + at) for at in range(count)),
        interval=1, exchange_mbps=0.5, detect_seconds=5.0, committed=V4,
        replicated=tuple(tuple(Extent(rank, 0, 64) for rank in group) for group in groups), domains=("r",) * count,
    )  # fmt: skip


def test_what_is_written_is_read_and_is_its_owners_alone(tmp_path):
    wanted = protection()
    reference = job_file.write(tmp_path, wanted)
    assert job_file.read(tmp_path, reference) == wanted and reference.ranks == 4
    assert job_file.write(tmp_path, replace(wanted, lineage=9, position=0)).job == reference.job, "once for the node"
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size == reference.nbytes


def test_a_lost_or_damaged_file_is_refused_and_written_again(tmp_path):
    wanted = protection()
    reference = job_file.write(tmp_path, wanted)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ProtocolError, match="does not match its digest"):
        job_file.read(tmp_path, reference)
    path.unlink()
    with pytest.raises(ProtocolError, match="cannot be read"):
        job_file.read(tmp_path, reference)
    with pytest.raises(ProtocolError, match="does not match its digest"):
        job_file.write_content(tmp_path, reference.job, b"{}")
    job_file.write(tmp_path, wanted)
    assert job_file.read(tmp_path, reference) == wanted


def test_a_file_that_is_too_long_is_never_read_whole(tmp_path, monkeypatch):
    reference = job_file.write(tmp_path, protection())
    monkeypatch.setattr(job_file, "JOB_FILE_LIMIT", 100)
    with pytest.raises(ProtocolError, match="more than 100 bytes"):
        job_file.read(tmp_path, reference)
    with pytest.raises(ProtocolError, match="the limit is 100"):
        job_file.write(tmp_path, protection(8))


@pytest.mark.parametrize("change", [{"node_of": [0, 9, 0, 0]}, {"names": 3}, {"shapes": [[1]]}, {"losses": 7}])
def test_a_file_that_describes_no_job_is_refused(tmp_path, change):
    reference, content = job_file.refer(protection())
    altered = json.dumps({**json.loads(content), **change}).encode()
    digest = job_file._digest_of(altered)
    job_file.write_content(tmp_path, digest, altered)
    with pytest.raises(ProtocolError, match="description of the job"):
        job_file.read(tmp_path, replace(reference, job=digest))


def test_ranks_of_a_node_may_write_it_at_once(tmp_path):
    reference, content = job_file.refer(protection(64))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: job_file.write_content(tmp_path, reference.job, content), range(400), timeout=300))
    assert [path.name for path in tmp_path.iterdir()] == [f"job-{reference.job}.json"]


def test_only_the_files_of_what_is_protected_stay(tmp_path):
    before, now = (job_file.write(tmp_path, protection(ranks)) for ranks in (4, 8))
    job_file.record(tmp_path, now, 7)
    assert not job_file.holds(tmp_path, before.job) and job_file.holds(tmp_path, now.job)
    assert job_file.read_record(tmp_path) == (now, 7)
    job_file.forget(tmp_path)
    assert not list(tmp_path.glob("job-*"))


@pytest.mark.parametrize("ranks", [64, 16384])
def test_messages_do_not_grow_with_the_job(tmp_path, monkeypatch, ranks):
    """Names of 48 characters; `rebuild` with all other nodes as holders."""
    sent = []
    monkeypatch.setattr(Client, "_connect", lambda self: None)
    monkeypatch.setattr(Client, "_ask", lambda self, name, *, extra_seconds, **fields: sent.append(fields) or {})
    wanted = protection(ranks, 8)
    client = Client(tmp_path)
    client.protect(0, 1, wanted)
    holders = dict(enumerate(wanted.endpoints))
    client.rebuild(ranks - 1, 1, V4, wanted, None, holders, range(0, len(holders), 8))
    assert [len(msgpack.packb(fields)) < LARGEST_MESSAGE for fields in sent] == [True, True]
    plan = wanted.plan()
    assert {at for at, _, _ in sent[1]["holders"]} == plan.nodes_for(ranks - 1) and len(plan.nodes_for(ranks - 1)) == 8
    assert set(sent[1]["lost"]) <= plan.nodes_for(ranks - 1)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40), st.integers(1, 4), st.booleans())
def test_every_job_comes_back_as_it_was(tmp_path_factory, count, per_node, bare):
    wanted = protection(count * per_node, per_node)
    if bare:
        wanted = replace(wanted, base=None, committed=None, replicated=(), domains=())
    folder = tmp_path_factory.mktemp("run")
    assert job_file.read(folder, job_file.write(folder, wanted)) == wanted
