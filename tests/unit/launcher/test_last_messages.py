"""Silent processes, against a model that looks at all of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.launcher.rounds.last_messages import LastMessages

SILENCE = 10.0
STEPS = st.tuples(
    st.sampled_from(["watch", "hear", "hear", "hang_up", "rest", "forget", "stop", "keep"]),
    st.sampled_from("abcde"),
    st.floats(0, 7),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_whatever_happens_those_are_silent_who_were_not_heard_from_for_so_long(story):
    alive, now = LastMessages(SILENCE), 1000.0
    last = {}
    watched = set()
    for what, token, seconds in story:
        now += seconds
        if what == "watch":
            alive.watch(token, now)
            last[token] = now
            watched.add(token)
        elif what == "hear":
            alive.hear(token, now)
            last |= {token: now} if token in last else {}
        elif what == "hang_up":
            alive.hang_up(token)
            last |= {token: float("-inf")} if token in last else {}
        elif what == "rest":
            alive.rest(token)
            watched.discard(token)
        elif what == "stop":  # messages of the time in which it was stopped have been noted already
            alive.was_stopped(20 * seconds, now)
            last = {each: min(at + 20 * seconds, now) for each, at in last.items()}
        elif what == "forget":
            alive.forget(token)
            last.pop(token, None)
            watched.discard(token)
        else:
            alive.keep("abc")
            last = {each: at for each, at in last.items() if each in "abc"}
            watched &= last.keys()
        silent = {each for each, at in last.items() if now - at > SILENCE + 1e-6}
        nearly = {each for each, at in last.items() if abs(now - at - SILENCE) <= 1e-6}
        found = set(alive.silent(now))
        assert found - nearly == silent & watched - nearly
        assert {each for each in "abcde" if alive.is_silent(each, now)} - nearly == silent - nearly
        assert {each for each in "abcde" if each in alive} == set(last)


def test_the_silent_ones_come_in_the_order_of_their_last_messages():
    alive = LastMessages(SILENCE)
    for number, token in enumerate("abc"):
        alive.watch(token, float(number))
    alive.hear("a", 3.0)
    assert alive.silent(12.5) == ["b", "c"]
    assert alive.silent(14.0) == ["b", "c", "a"]


def test_messages_that_were_noted_before_a_stop_was_noticed_do_not_hide_the_silence_of_others():
    alive = LastMessages(SILENCE)
    alive.watch("a", 0.0)
    alive.hear("a", 500.0)  # this process was stopped since, and has not noticed it yet
    alive.was_stopped(499.0, 500.0)
    alive.watch("b", 500.5)
    alive.hear("a", 505.0)
    assert alive.silent(511.0) == ["b"], "a is not heard from in the future"
