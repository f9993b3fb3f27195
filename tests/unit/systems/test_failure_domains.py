"""Which failure domains count: those that nodes report, or those by which the snapshots in memory were protected."""

from dataclasses import replace

import pytest

from ft_plugins.smp.serve import job_file
from ft_plugins.smp.serve.job_file import PROTECTION_FILE, RecordedDomains, read_domains
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.systems.reft.failure_domains import differences, kept, without_own

NODES = ("a", "a", "b", "c")  # of each rank


def test_a_record_says_where_it_differs_from_what_the_nodes_report():
    record = RecordedDomains(3, NODES, ("x", "x", "y"))
    assert differences(record, ("x", "x", "y"), 3) == []
    assert differences(record, ("x", "z", ""), 3) == [(1, "x"), (2, "y")]
    assert differences(record, (), 3) == [(0, "x"), (1, "x"), (2, "y")]
    assert differences(RecordedDomains(3, NODES), ("", "z", ""), 3) == [(1, "")]


def test_a_record_of_other_numbers_of_ranks_on_nodes_says_nothing():
    assert differences(RecordedDomains(3, ("a", "b", "b", "b"), ("x", "y")), ("x", "y", "z"), 3) is None


def test_the_record_of_the_newest_lineage_counts_and_without_one_the_report():
    old, new = (1, [(0, "old"), (1, "old")]), (4, [(0, "new")])
    assert kept(("a", "b"), [old, new, (3, None)], 2) == ("new", "b")
    assert kept(("a", "b"), [(9, None)], 2) == ("a", "b") == kept(("a", "b"), [], 2)
    assert kept((), [(1, [(1, "x")])], 2) == ("", "x")
    assert kept(("a", ""), [(1, [(0, "")])], 2) == (), "every node is a domain of its own again"
    assert without_own(["", ""]) == ()


PROTECTED = Protection(
    2, None, ("a", "b"), ((0, 1),), (Shape(10, 10, 1, 7),) * 2, 1, 0, (("127.0.0.1", 1), ("127.0.0.1", 2)), 1, 0.0, 5.0,
    domains=("x", "y"),
)  # fmt: skip


def test_the_record_says_by_which_domains_groups_were_cut(tmp_path):
    assert read_domains(tmp_path) is None
    job_file.record(tmp_path, job_file.write(tmp_path, PROTECTED), 3)
    assert read_domains(tmp_path) == RecordedDomains(2, ("a", "b"), ("x", "y"))
    job_file.record(tmp_path, job_file.write(tmp_path, replace(PROTECTED, domains=())), 3)
    assert read_domains(tmp_path) == RecordedDomains(2, ("a", "b"), ()), "each node is a domain of its own"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"job": "../x", "lineage": 1}', '{"lineage": -1, "token": 1}'])
def test_a_file_that_is_no_record_counts_as_none(tmp_path, content):
    (tmp_path / PROTECTION_FILE).write_text(content)
    assert read_domains(tmp_path) is None


def test_a_record_whose_job_file_is_lost_or_damaged_counts_as_none(tmp_path):
    reference = job_file.write(tmp_path, PROTECTED)
    job_file.record(tmp_path, reference, 3)
    (path,) = tmp_path.glob("job-*.json")
    path.write_bytes(path.read_bytes().replace(b'"x"', b'"z"'))
    assert read_domains(tmp_path) is None
    path.unlink()
    assert read_domains(tmp_path) is None
