"""What a job did with its bubbles, from events: sums between versions that counted under one plan, and nothing else."""

import pytest

from ft_plugins.bubbles.gate.pacing_limits import LIMITS
from ft_plugins.events import Event
from quickstart_report.bubble_use import bubble_use
from quickstart_report.run_pictures import draw_bubbles, size

RANKS = range(4)
MIB = 1 << 20


def event(name, time, node, rank=None, pid=100, **fields):
    return Event(name, time, f"node{node}", rank, pid, fields)


def planned(time, iterations=2, reason="", ranks=RANKS):
    """Ranks plan, in an iteration of the same number as the time: half of 100 ms is a bubble, the first or second."""
    found = []
    for rank in ranks:
        node, begin = rank // 2, 0.05 * (rank % 2)
        spans = [["forward", 0.05 - begin, 0.08 - begin], ["update", 0.08 - begin, 0.1 - begin]]
        windows = [] if reason else [[0, begin + 0.01, begin + 0.04, MIB]]
        found.append(event("bubbles.planned", time, node, rank, iterations=iterations, idle_seconds=0.05))
        found.append(
            event(
                "timeline.recorded", time, node, rank, iteration=int(time), seconds=0.1, spans=spans,
                bubbles=[[0, begin, begin + 0.05]], windows=windows, left_out=0, bytes=2 * MIB,
                receiver=(rank + 2) % 4, reason=reason,
            )
        )  # fmt: skip
    return found


def counted(time, iteration, inside, late=0, by_rate=0, pid=100):
    """Each node says so of its two ranks, which have sent alike."""
    return [
        event(
            "version.committed", time, node, pid=pid, lineage=1, iteration=iteration, in_bubbles=inside, late=late,
            by_rate=by_rate,
            filled=[[rank, 0, inside // 2] for rank in RANKS if rank // 2 == node],
        )
        for node in (0, 1)
    ]  # fmt: skip


def used(*events):
    found = bubble_use([one for those in events for one in those])
    assert found is not None
    return found


STEADY = [planned(10), counted(11, 8, 100, 0, 4000), counted(12, 10, 700, 50, 4000), counted(13, 12, 1900, 50, 4150)]


def test_what_went_before_there_was_a_plan_is_left_out():
    use = used(counted(9, 6, 0, 0, 4000), *STEADY)
    traffic = use.traffic
    assert (traffic.versions, traffic.iterations, traffic.iterations_per_version) == (2, 4, 2.0)
    assert (traffic.in_bubbles, traffic.late, traffic.by_rate) == (3600, 100, 300), "of both nodes"
    assert traffic.in_bubble_share == 0.9 and traffic.idle_share == pytest.approx(0.5)
    assert use.sent == {rank: {0: 900} for rank in RANKS} and use.bytes_per_iteration(3, 0) == 225
    assert use.nodes == {0: "node0", 1: "node0", 2: "node1", 3: "node1"}
    line = traffic.line()
    assert line.startswith("Bubbles are 50% of an iteration; a version every 2.0 iterations (planned: 2); 90% of")
    assert line.endswith("2% late, 8% rate-limited")


def test_another_incarnation_counts_from_nothing_and_is_not_added():
    again = [event("rank.attached", 14, rank // 2, rank) for rank in RANKS]
    after = counted(15, 13, 10_000)
    assert used(*STEADY, again, after).traffic == used(*STEADY).traffic
    fresh = [planned(16), counted(17, 14, 100), counted(18, 15, 200)]
    assert used(*STEADY, again, *fresh).traffic == used(*STEADY).traffic, "more versions counted under the first plan"
    more = [counted(19, 16, 300), counted(20, 17, 400)]
    found = used(*STEADY, again, *fresh, *more).traffic
    assert (found.versions, found.iterations, found.in_bubbles) == (3, 3, 600)


def test_without_a_plan_there_is_nothing_to_say():
    assert bubble_use([]) is None and bubble_use(counted(9, 6, 0)) is None


def test_a_plan_under_which_no_two_versions_counted_says_so():
    traffic = used(planned(10, iterations=3), counted(11, 8, 100)).traffic
    assert traffic.iterations_per_version is None and traffic.in_bubble_share is None
    assert "planned: a version every 3; fewer than two were committed since the plan" in traffic.line()


def test_versions_that_needed_no_bytes_are_not_said_to_be_missing():
    traffic = used(planned(10, iterations=3), counted(11, 8, 100), counted(12, 11, 100), counted(13, 14, 100)).traffic
    assert traffic.in_bubble_share is None
    assert traffic.line().endswith("a version every 3.0 iterations (planned: 3); no copies were sent")


def test_all_bubbles_are_counted_also_those_beyond_what_a_timeline_shows():
    """Of each rank's bubbles of 50 ms the timeline shows the first 10 ms."""
    plan = planned(10)
    for recorded in plan[1::2]:
        recorded.fields.update({"bubbles": [[0, 0.0, 0.01]], "left_out": 4})
    assert used(plan, counted(11, 8, 100)).traffic.idle_share == pytest.approx(0.5)


def test_a_rank_that_was_killed_before_its_timeline_does_not_shift_the_plans_after_it():
    again = [event("rank.attached", 11, rank // 2, rank) for rank in RANKS]
    first = planned(10, ranks=(0, 1, 3))
    use = used(first, again, planned(14, iterations=5), *(counted(15 + k, 15 + k, 100 * k) for k in range(3)))
    assert (use.traffic.versions, use.traffic.in_bubbles, use.traffic.planned_iterations_per_version) == (2, 400, 5)
    assert [row.rank for row in use.rows] == [*RANKS] and use.nodes[2] == "node1"


def test_ranks_that_a_resize_took_away_do_not_hide_the_plans_of_the_others():
    again = [event("rank.attached", 11, rank // 2, rank) for rank in (0, 1)]
    small = planned(14, ranks=(0, 1))
    kept = [[one for one in counted(15 + k, 15 + k, 100 * k) if one.node == "node0"] for k in range(3)]
    use = used(planned(10), again, small, *kept)
    assert [row.rank for row in use.rows] == [0, 1] and use.traffic.versions == 2


def test_two_incarnations_that_planned_in_the_same_iteration_have_two_plans():
    """The first ended before a version was committed, so the second began from scratch too."""
    again = [event("rank.attached", 11, rank // 2, rank) for rank in RANKS]
    second = planned(14, iterations=5)
    for recorded in second[1::2]:
        recorded.fields["iteration"] = 10
    use = used(planned(10, ranks=(0, 1, 2)), again, second, *(counted(15 + k, 11 + k, 100 * k) for k in range(2)))
    assert use.traffic.planned_iterations_per_version == 5 and use.traffic.in_bubbles == 200


def test_an_smp_that_replaces_another_counts_from_nothing_and_is_not_added():
    assert used(*STEADY, counted(14, 14, 10, pid=101), counted(15, 16, 20, pid=101)).traffic == used(*STEADY).traffic


def told(bytes_by_bubble):
    """Of rank 0, as a node tells it: the bubbles in which most went."""
    most = sorted(bytes_by_bubble.items(), key=lambda one: -one[1])[: LIMITS.reported_bubbles]
    return [[0, bubble, nbytes] for bubble, nbytes in sorted(most)]


def test_a_bubble_that_a_node_did_not_tell_both_times_is_not_known_and_not_empty(tmp_path):
    """Of 40 bubbles the last 32 had most at first, later all but the second eight; nothing ever went in the 41st."""
    before = {bubble: 1000 + bubble for bubble in range(40)}
    after = {bubble: nbytes + (0 if 8 <= bubble < 16 else 400) for bubble, nbytes in before.items()}
    plan = planned(10)
    plan[1].fields["windows"] = [[bubble, bubble / 500, bubble / 500 + 0.001, MIB] for bubble in range(41)]
    events = list(plan)
    for time, iteration, filled in ((11, 8, before), (12, 10, after)):
        counts = counted(time, iteration, 100 * iteration)
        counts[0].fields["filled"] = told(filled)
        events += counts
    use = used(events)
    found = [use.bytes_per_iteration(0, bubble) for bubble in range(41)]
    assert found == [None] * 16 + [200.0] * 24 + [None]
    assert use.bytes_per_iteration(2, 0) == 50 and use.bytes_per_iteration(2, 1) == 0, "of rank 2 all is told"
    draw_bubbles(use, tmp_path / "part.png")
    assert (tmp_path / "part.png").read_bytes().startswith(b"\x89PNG")


def test_where_most_bubbles_only_came_up_later_what_went_in_them_is_known():
    events = list(planned(10))
    for time, iteration, filled in ((11, 8, {3: 10}), (12, 10, {at: 10 + at for at in range(40)})):
        counts = counted(time, iteration, 100 * iteration)
        counts[0].fields["filled"] = told(filled)
        events += counts
    use = used(events)
    assert [use.bytes_per_iteration(0, at) for at in (3, 7, 8, 39)] == [None, None, 9.0, 24.5]


def test_the_picture_is_drawn(tmp_path):
    for name, plan in (("sent", STEADY), ("rate", [planned(10, reason="no bubbles")])):
        draw_bubbles(used(*plan), tmp_path / f"{name}.png")
        written = (tmp_path / f"{name}.png").read_bytes()
        assert written.startswith(b"\x89PNG") and len(written) > 10_000
    assert (tmp_path / "sent.png").read_bytes() != (tmp_path / "rate.png").read_bytes()


def test_bytes_are_told_in_a_unit_for_people():
    assert (size(3 * MIB / 2), size(2048), size(0)) == ("1.5 MiB", "2 KiB", "0 KiB")


def test_of_a_node_with_too_few_commits_the_bytes_are_unknown_and_others_count_by_their_own_iterations():
    """Node 1 has one commit; then it has two that are half as far apart as those of node 0."""
    first, second, third = STEADY[1:]
    use = used(STEADY[0], first, second[:1], third[:1])
    assert [use.bytes_per_iteration(rank, 0) for rank in RANKS] == [225, 225, None, None]
    use = used(STEADY[0], first, second, third[:1])
    assert [use.bytes_per_iteration(rank, 0) for rank in RANKS] == [225, 225, 150, 150]
