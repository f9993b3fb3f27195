"""Times of modules from edges: no time counted twice, whatever is missing or interleaved."""

from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.sync.layers.layers_measured import EdgeKind, TimedEdge, module_times

KINDS = {
    "f+": EdgeKind.FORWARD_BEGIN, "f-": EdgeKind.FORWARD_END,
    "b+": EdgeKind.BACKWARD_BEGIN, "b-": EdgeKind.BACKWARD_END,
}  # fmt: skip


def edges(words, first=100.0):
    """'f+ a, 3, f- a': numbers are seconds that pass."""
    now, made = first, []
    for word in words.split(", "):
        if word[0].isdecimal():
            now += float(word)
        else:
            kind, _, module = word.partition(" ")
            made.append(TimedEdge(KINDS[kind], module, now))
    return made


def times(words, end=1e6):
    """(forward, backward) by module."""
    return {module: (one.forward, one.backward) for module, one in module_times(edges(words), end).items()}


def test_layers_have_the_time_between_their_edges():
    assert times("f+ a, 1, f- a, 9, f+ b, 2, f- b, 9, b+ b, 4, b- b, b+ a, 8, b- a, 9, f+ a, f- a") == {
        "a": (1, 8), "b": (2, 4),
    }  # fmt: skip


def test_an_outer_module_has_what_none_of_its_inner_ones_has():
    assert times("f+ , 1, f+ a, 2, f- a, 4, f- , b+ , 8, b+ a, 16, b- a, 32, b- ") == {"": (5, 40), "a": (2, 16)}


def test_a_recomputation_is_backward():
    plain = "f+ a, 1, f- a, f+ b, 1, f- b, "
    assert times(f"{plain}b+ b, 1, f+ b, 2, f- b, 4, b- b, b+ a, f+ a, 8, f- a, 16, b- a") == {
        "a": (1, 24), "b": (1, 7),
    }  # fmt: skip
    assert times(f"{plain}b+ b, 1, f+ a, 2, f- a, f+ b, 4, f- b, 8, b- b, b+ a, 16, b- a") == {
        "a": (1, 18), "b": (1, 13),
    }  # fmt: skip


def test_micro_batches_add_up_in_any_order():
    warm, steady = "f+ a, 1, f- a, f+ b, 2, f- b", "b+ b, 4, b- b, b+ a, 8, b- a"
    expected = {"a": (3, 24), "b": (6, 12)}
    assert times(", 5, ".join([warm, warm, steady, warm, steady, steady])) == expected
    assert times(", ".join([warm, warm, warm, steady, steady, steady])) == expected


def test_what_is_missing_is_made_up_for():
    assert times("b- a, 5, f- b, 1, f+ a, 2") == {"a": (0, 0), "b": (0, 0)} | {"a": (1e6 - 106, 0)}, (
        "an end of what is not open is ignored; an iteration closes what is"
    )
    assert times("f+ a, 2, f+ b, 1, f+ a, 4, f- a, 8, f- b") == {"a": (6, 0), "b": (9, 0)}, "begun again, not twice"
    assert times("f+ a, 2, f- a", 101.0) == {"a": (1, 0)}, "nothing is after the end"
    assert module_times([], 5.0) == {}


MODULES = st.sampled_from("abc")
STEPS = st.lists(st.tuples(st.sampled_from(EdgeKind), MODULES, st.integers(-2, 9)), max_size=40)


def made(steps):
    """Whole seconds, so that sums are exact; clocks may go back."""
    now, found = 50, []
    for kind, module, passed in steps:
        now += passed
        found.append(TimedEdge(kind, module, float(now)))
    return found


@given(STEPS, st.integers(0, 400))
def test_no_second_is_counted_twice(steps, end):
    listed = made(steps)
    found = module_times(listed, float(end))
    assert all(one.forward >= 0 and one.backward >= 0 for one in found.values())
    assert list(found) == list(dict.fromkeys(edge.module for edge in listed))
    elapsed = max(end - min(listed[0].seconds, end), 0) if listed else 0
    assert sum(one.forward + one.backward for one in found.values()) <= elapsed


@given(STEPS)
def test_each_second_belongs_to_what_is_innermost(steps):
    """Against a slow reference, which asks for each second."""
    listed = made([(kind, module, abs(passed)) for kind, module, passed in steps])
    end = int(listed[-1].seconds) + 3 if listed else 0
    expected = {edge.module: [0.0, 0.0] for edge in listed}
    for second in range(50, end):
        running = []
        for edge in listed:
            key = ("backward" in edge.kind.value, edge.module)
            if edge.seconds <= second:
                running = [one for one in running if one != key] + ([key] if "begin" in edge.kind.value else [])
        if running:
            expected[running[-1][1]][any(backward for backward, _ in running)] += 1
    found = module_times(listed, float(end))
    assert {module: [one.forward, one.backward] for module, one in found.items()} == expected


@given(STEPS, STEPS)
def test_time_outside_of_modules_changes_nothing(first, second):
    """Two parts that leave nothing open add up, whatever passes between them."""
    close = [(kind, module, 0) for kind in (EdgeKind.FORWARD_END, EdgeKind.BACKWARD_END) for module in "abc"]
    parts = [[(kind, module, abs(passed)) for kind, module, passed in part] + close for part in (first, second)]
    alone = [module_times(made(part), 1e6) for part in parts]
    both = module_times(made([*parts[0], (EdgeKind.FORWARD_END, "a", 1000), *parts[1]]), 1e6)
    for module, one in both.items():
        assert one.forward == sum(part[module].forward for part in alone)
        assert one.backward == sum(part[module].backward for part in alone)


class Counting(str):
    """A name that counts how often names are looked up or compared."""

    looked_up = 0

    def __hash__(self):
        Counting.looked_up += 1
        return super().__hash__()

    def __eq__(self, other):
        Counting.looked_up += 1
        return super().__eq__(other)


@given(st.integers(1, 300), st.booleans())
def test_cost_is_linear(count, reverse):
    """Also if all modules are open at once."""
    names = [Counting(f"m{at}") for at in range(count)]
    listed = [TimedEdge(EdgeKind.FORWARD_BEGIN, name, float(at)) for at, name in enumerate(names)]
    listed += [TimedEdge(EdgeKind.FORWARD_END, name, float(count)) for name in (reversed(names) if reverse else names)]
    Counting.looked_up = 0
    module_times(listed, 3.0 * count)
    assert Counting.looked_up <= 12 * len(listed)
