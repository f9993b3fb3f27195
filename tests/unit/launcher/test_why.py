"""Why a job failed last."""

import re
from types import SimpleNamespace

import pytest

from ft_plugins.events import Event, catalogue
from ft_plugins.launcher import command
from ft_plugins.launcher.agent.why import why


def at(time, name, rank=None, node="a", /, **fields):
    return Event(name, time, node, rank, 0, fields)


def failed(time, rank, exitcode=1, message="", node="a", /, **fields):
    signal = "SIGKILL" if exitcode == -9 else ""
    return at(time, "worker.failed", rank, node, exitcode=exitcode, signal=signal, message=message, **fields)


def resumed(time):
    return at(time, "ranks.resumed", 0, token=1, iteration=1)


def told(account):
    assert account is not None
    return {line[2:13].strip(): line[13:] for line in account.lines()}


def test_the_rank_that_was_killed_is_the_cause_and_not_those_that_lost_it():
    account = why([
        resumed(1), failed(10.0, 0, 1, "Connection closed by peer"), failed(10.1, 3, -9, oom_kills=2),
    ])  # fmt: skip
    shown = told(account)
    assert shown["failed"].startswith("rank 3 on node a, ") and shown["failed"].endswith("was ended by SIGKILL")
    assert shown["memory"] == "the kernel killed 2 processes of this node's control group for lack of memory"
    assert shown["to do"].startswith("Give the job more memory")
    assert shown["others"] == "rank 0 (it may only have lost a peer)"
    assert "its error" not in shown and "again" not in shown and "since then" not in shown


def test_a_kill_that_the_kernel_did_not_count_is_none_for_lack_of_memory_and_without_a_count_it_is_unknown():
    counted, uncounted = (told(why([failed(1, 3, -9, oom_kills=kills)])) for kills in (0, None))
    assert "killed no process" in counted["memory"] and "unknown" in uncounted["memory"]
    assert "memory" not in told(why([failed(1, 3, 1, "ValueError: x")]))


def test_the_last_words_and_the_flight_record_are_shown_without_codes_of_a_terminal():
    shown = told(why([failed(1, 3, 1, "ValueError: \x1b[31mloss", flight_record="/traces/nccl_3")]))
    assert shown["its error"] == "ValueError: \\x1b[31mloss" and shown["NCCL"] == "/traces/nccl_3"
    assert shown["to do"] == catalogue.WORKER_FAILED.action


def test_a_hang_names_the_rank_for_which_the_others_waited_and_the_folder_of_the_stacks():
    shown = told(why([
        resumed(1), at(90, "job.hung", None, "a", about=2, culprit="b", stacks="/run/hangs/1", reason="rank 2 reads"),
        at(91, "workers.killed", None, "a", lost=["hang"], reason="a hang"),
    ]))  # fmt: skip
    assert shown["failed"].startswith("rank 2 on node b, ") and shown["failed"].endswith("rank 2 reads")
    assert shown["stacks"] == "/run/hangs/1" and shown["to do"] == catalogue.JOB_HUNG.action


def test_the_newest_outage_is_described_and_how_often_it_came():
    first = [resumed(1), failed(2, 1, 1, "IndexError: 7 of 5")]
    again = [failed(time, 3, 1, f"ValueError: loss {time}") for time in (12, 22)]
    events = [*first, resumed(11), again[0], resumed(21), again[1]]
    account = why(events)
    assert account is not None and (account.rank, account.same, account.recovered) == (3, 2, False)
    assert told(account)["again"] == "the same cause ended the last 2 incarnations"
    assert told(why([*events, resumed(31)]))["since then"] == "iterations were completed again"


def test_two_starts_that_failed_before_an_iteration_are_two_outages():
    restarted = at(15, "workers.restarted", restart=1, token=2)
    shown = told(why([at(1, "job.started"), failed(10, 1, -9), restarted, failed(20, 1, -9)]))
    assert shown["again"] == "the same cause ended the last 2 incarnations" and "others" not in shown


def test_a_failure_that_recurs_says_what_ft_run_found():
    recurred = at(13, "failure.recurred", reason="give the same command with --ftp-resume before:7")
    assert told(why([failed(12, 3, 1, "NaN"), recurred]))["to do"].endswith("--ftp-resume before:7")


def test_a_lost_node_is_named_as_other_nodes_saw_it():
    shown = told(why([at(5, "node.lost", None, "a", lost=["node b"])]))["failed"]
    assert shown.startswith("node b, ") and shown.endswith("lost, as was seen from node a")
    killed = at(5, "workers.killed", None, "a", lost=["node b"], reason="node b stopped responding")
    assert told(why([killed]))["failed"].startswith("node b, ")


def test_a_rank_that_was_stopped_by_a_signal_is_named_with_what_to_look_for():
    lost = at(5, "node.lost", None, "a", lost=["rank 3", "rank 4"])
    killed = at(5.1, "workers.killed", None, "a", lost=["rank 3", "rank 4"], reason="rank 3, rank 4 stopped responding")
    for events in ([lost, killed], [killed]):
        account = why([resumed(1), *events])
        assert account is not None and (account.rank, account.node, account.others) == (3, "a", "rank 4")
        shown = told(account)
        assert shown["failed"].startswith("rank 3 on node a, ") and "was stopped by a signal" in shown["failed"]
        assert "kill -STOP" in shown["to do"]
    account = why([resumed(1), lost, resumed(8), at(9, "node.lost", None, "a", lost=["rank 5", "rank x"])])
    assert account is not None and (account.rank, account.others, account.same) == (5, "", 1)


def test_lost_iterations_are_no_names_of_nodes():
    shown = told(why([at(5, "state.lost", None, "a", completed=9, lost=9)]))
    assert shown["failed"].endswith(catalogue.STATE_LOST.what)


def test_what_a_resume_lost_does_not_hide_the_failure_before_it():
    restarted = [failed(1, 3, 1, "ValueError: x"), at(2, "workers.restarted")]
    lost = at(3, "state.lost", None, "a", completed=9, lost=9)
    for after in ([], [resumed(4)]):
        shown = told(why([resumed(0), *restarted, lost, *after]))
        assert shown["failed"].startswith("rank 3 ") and ("since then" in shown) is bool(after)
    later = at(5, "resume.differed", 0, "a", reason="another loss")
    assert told(why([*restarted, resumed(4), later]))["failed"].endswith("another loss"), "it trained in between"


@pytest.mark.parametrize("ahead", [-40, 0, 3, 40])
def test_one_outage_of_nodes_whose_clocks_differ_stays_one(ahead):
    """Node b's clock is so many seconds ahead; a restart takes 5 s."""

    def both(time, name, /, **fields):
        return [at(time, name, None, "a", **fields), at(time + ahead, name, None, "b", **fields)]

    start = [*both(0, "job.started"), *both(2, "ranks.resumed", lineage=1, iteration=1)]
    first = [failed(50, 0, 1, "lost a peer", "a"), failed(50 + ahead, 5, -9, "", "b")]
    again = both(52, "workers.restarted", restart=1, token=2)
    second = [failed(54, 0, 1, "lost a peer", "a"), failed(54 + ahead, 5, -9, "", "b")]
    after = [*both(56, "workers.restarted", restart=2, token=3), *both(58, "ranks.resumed", lineage=2, iteration=30)]
    for events, same, recovered in (
        ([*start, *first], 1, False),
        ([*start, *first, *again, *second], 2, False),
        ([*start, *first, *again, *second, *after], 2, True),
    ):
        account = why(events)
        assert account is not None and (account.rank, account.node) == (5, "b")
        assert (account.others, account.same, account.recovered) == ("rank 0", same, recovered)


def test_what_a_substitute_lost_does_not_hide_the_failure_on_another_node():
    cost = at(6, "state.lost", 1, "c", completed=9, lost=9)
    account = why([resumed(1), failed(5, 0, 1, "ValueError: x"), at(5.5, "job.started", None, "c"), cost])
    assert account is not None and (account.node, account.words) == ("a", "ValueError: x")


def test_a_lost_node_is_the_cause_and_not_the_ranks_that_lost_their_peer_on_it():
    lost = at(5.1, "node.lost", None, "a", lost=["node b"])
    aborted = [failed(5, 0, 1, "RuntimeError: Connection closed by peer"), failed(5, 1, -6), lost]
    shown = told(why(aborted))
    lone = "(it may only have lost a peer)"
    assert shown["failed"].startswith("node b, ") and shown["others"] == f"rank 0 {lone}, rank 1 {lone}"
    own = told(why([failed(5, 0, 1, "ValueError: x"), lost]))
    assert own["failed"].startswith("rank 0 "), "its own error is the cause"


PEER = "RuntimeError: Connection closed by peer"


def replaced(time, gone, *new, asked=False):
    return at(time, "node.replaced", gone=[gone], new=list(new), asked=[gone] if asked else [])


def test_a_node_that_another_one_replaced_was_lost_and_the_ranks_elsewhere_only_lost_their_peer():
    begun = [resumed(1), failed(5, 0, 1, PEER), failed(5, 1, 1, PEER)]
    shown = told(why([*begun, replaced(6, "b", "c"), at(7, "workers.restarted"), resumed(8)]))
    assert shown["failed"].startswith("node b, ") and shown["failed"].endswith(": lost; c takes its place")
    assert "rank 0" in shown["others"] and "since then" in shown
    early = told(why(begun))  # the loss of the node is not known yet
    assert early["failed"].endswith(": exited with status 1: a peer's connection closed, or it gave no answer")
    assert "named here once that is known" in early["to do"] and "logs of the other nodes" in early["to do"]
    old = failed(0, 3, 78, "refused")  # the leader: its survivors have no failure
    assert told(why([old, resumed(1), replaced(6, "b")]))["failed"].endswith(": lost; the job goes on without it")
    own = told(why([resumed(1), failed(5, 1, 1, "ValueError: x"), replaced(6, "b")]))
    assert own["failed"].startswith("rank 1 "), "its own error is the cause"


def test_two_nodes_lost_one_after_the_other_are_no_cause_that_came_again():
    account = why([resumed(1), replaced(6, "b", "c"), resumed(8), replaced(9, "c", "d")])
    assert account is not None and (account.node, account.same) == ("c", 1)


def test_a_drain_is_told_as_one_and_what_the_drained_node_no_longer_reaches_as_nothing():
    drained = at(5, "node.drained", None, "b", iteration=40)
    begun = [resumed(1), at(1, "ranks.resumed", 2, "b", token=1, iteration=1), drained, at(5, "job.ended", None, "b")]
    after = [
        failed(5.5, 0, 1, PEER),
        replaced(6, "b", "c"),
        resumed(8),
        at(20, "node.lost", None, "b", lost=["node a"]),
    ]
    for events in (begun, [*begun, *after]):
        account = why(events)
        assert account is not None and (account.node, account.drained) == ("b", True)
        assert told(account)["drained"].endswith("after iteration 40; no iteration was lost"), "and nothing failed"
    elsewhere = told(why([resumed(1), failed(5.5, 0, 1, PEER), replaced(6, "b", "c", asked=True)]))
    assert elsewhere["drained"].startswith("node b, ") and elsewhere["drained"].endswith(
        "asked to leave; c takes its place"
    )


@pytest.mark.parametrize("begins", ["job.started", "job.ended"])
def test_what_a_node_without_ranks_no_longer_reaches_is_no_failure(begins):
    spare = [at(0, begins), at(5, "node.lost", lost=["node b"])]
    assert why(spare) is None
    for name in ("incarnation.fenced", "workers.restarted", "ranks.resumed"):
        assert why([spare[0], at(1, name), spare[1]]) is not None


def test_a_later_start_that_was_refused_hides_no_loss_of_the_job_and_is_told_with_its_error():
    own = [at(0, "job.started"), resumed(1), failed(5, 3, -9)]
    second = [at(50, "job.started"), failed(51, 0, 78, "rank 0: another job: give it a name")]
    ended = [*own, resumed(8), failed(60, 1, 78, "refused while it trained")]
    shown, alone, trained = (told(why(events)) for events in ([*own, *second], second, ended))
    assert shown["failed"].startswith("rank 3 ") and "again" not in shown and "since then" not in shown
    assert shown["refused"].startswith("a later start") and shown["refused"].endswith(": another job: give it a name")
    assert re.search(r" [+-]\d{4}: exited with status 78$", alone["failed"]), "a time has its zone"
    assert alone["to do"].startswith("Do what its error says")
    assert trained["failed"].startswith("rank 1 ") and "refused" not in trained


def test_lines_fit_a_terminal():
    account = why([failed(1, 3, 1, "ValueError: " + "word " * 60)])
    assert account is not None and max(map(len, account.lines(80))) <= 80


def test_a_job_in_which_nothing_failed_has_no_account():
    assert why([]) is None and why([resumed(1)]) is None


def test_what_cannot_be_told_at_the_end_of_ft_run_does_not_replace_its_exit_status(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run_directory", lambda job, node: tmp_path)
    plan = SimpleNamespace(protected=True, job="j", node="a")
    started = at(1, "job.started").line()
    for exitcode in (1, None):
        last = Event("worker.failed", 2, "a", 0, 0, {"exitcode": exitcode}).line()
        (tmp_path / "events.jsonl").write_text(f"{started}\n{last}\n")
        said = command._account(plan)
        assert len(said) == 2 if exitcode else said == ["1 damaged event left out"]
