"""What counts and ends a script's loops is read from its code, and its values from the stack."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from textwrap import dedent, indent
from types import SimpleNamespace

import pytest
import torch

from ft_plugins.adapters.script import loop_counters as loop_counters_module
from ft_plugins.adapters.script.loop_code import LoopCode, loops_around
from ft_plugins.adapters.script.loop_counters import LoopCounters, decided_otherwise, loop_counters, not_continued


def at_the_mark(source: str) -> LoopCode:
    """The loops around the line that has the comment HERE."""
    source = dedent(source)
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "HERE" in text)
    return loops_around(ast.parse(source), line)


@pytest.mark.parametrize(
    ("source", "counters", "bounds", "deciding"),
    [
        ("train()  # HERE", (), (), ()),
        ("for epoch in range(first, 3):\n    train()  # HERE", ("epoch",), ("range", "first", "3"), ()),
        ("for number, batch in enumerate(loader, 1):  # HERE\n    train()", (), ("enumerate", "loader"), ()),
        (
            "while self.step < total['all']:\n    train()  # HERE",
            ("self.step", "total['all']", "self", "total"),
            (),
            (),
        ),
        (
            "for _ in endless():\n    if age > most:\n        break\n    train()  # HERE",
            ("_", "age", "most"),
            ("endless",),
            (),
        ),
        ("while not done:\n    if step == 9:\n        done = True\n    train()  # HERE", ("done", "step"), (), ()),
        ("while True:\n    if now > last:\n        kept = True\n    train()  # HERE", (), (), ("now", "last", "kept")),
        ("while True:\n    if nans > 10:\n        raise E\n    train()  # HERE", (), (), ("nans",)),
        ("while True:\n    if step % 9 == 0:\n        print(step)\n    train()  # HERE", (), (), ("step",)),
        ("while True:\n    train()  # HERE\n    self.seen += 1", (), (), ("self.seen",)),
        ("while True:\n    train()  # HERE\n    last[step % 4] = at['loss'] = 1", (), (), ("last", "at['loss']")),
        ("while a:\n    pass\nelse:\n    train()  # HERE", (), (), ()),
        ("for i in x:\n    def inner():\n        train()  # HERE", (), (), ()),
        (
            "def f():\n    with a:\n        try:\n            while b: g()  # HERE\n        finally: pass",
            ("b",),
            (),
            (),
        ),
        ("match a:\n    case 1:\n        while b:\n            train()  # HERE", ("b",), (), ()),
        ("while a:\n    try:\n        pass\n    except E:\n        train()  # HERE", ("a",), (), ()),
    ],
)
def test_the_expressions_that_count_and_bound_the_loops_around_a_line(
    source: str, counters: tuple[str, ...], bounds: tuple[str, ...], deciding: tuple[str, ...]
) -> None:
    assert at_the_mark(source) == LoopCode(counters, bounds, deciding)


@pytest.mark.parametrize(
    ("statement", "changed"),
    [
        ("sample = buffer.popleft()", ["sample", "buffer"]),
        ("del history[0], cache[key]", ["history[0]", "cache"]),
        ("random.shuffle(order)", ["order"]),
        ("heapq.heappush(self.best, score)", ["self.best"]),
        ("self.rng.shuffle(data.order)", ["data.order"]),
        ("stats[name].total += 1", ["stats"]),
        ("a, (b, *c) = step()", ["a", "b", "c"]),
        ("x = y.add(1)", ["x"]),
        ("make().extend(more)", []),
    ],
)
def test_what_a_statement_changes_is_carried_on(statement: str, changed: list[str]) -> None:
    assert list(at_the_mark(f"while True:\n    train()  # HERE\n    {statement}").carried) == changed


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("for one in each.values(): one.update(x)", "each[<each>].update(x)"),
        ("for name, one in self.each.items(): one.update(x)", "self.each[<each>].update(x)"),
        ("for number, one in enumerate(each, 1): one.update(x)", "each[<each>].update(x)"),
        ("for loss, one in zip(losses, each): one.update(x)", "each[<each>].update(x)"),
        ("each[name].update(x)", "each[<each>].update(x)"),
        ("each[name](x)", "each[<each>](x)"),
    ],
)
def test_what_is_called_of_each_element_is_found(source: str, call: str) -> None:
    assert call in at_the_mark(f"while True:\n    train()  # HERE\n    {source}").calls


def test_a_target_whose_next_element_is_being_fetched_does_not_count() -> None:
    source = """
        for epoch in range(3):
            for number, batch in enumerate(loader):{here}
                if epoch * size + number < start: continue
                train(){there}
    """
    fetching = at_the_mark(source.format(here="  # HERE", there=""))
    training = at_the_mark(source.format(here="", there="  # HERE"))
    assert "number" not in fetching.counters and {"epoch", "size", "start"} <= {*fetching.counters}
    assert {"epoch", "number", "batch"} <= {*training.counters}


@pytest.mark.parametrize(
    ("source", "cut"),
    [
        ("for e in range(3):\n  for b in islice(loader, size):  # HERE\n    train()", ("islice", "loader", "size")),
        ("for e in range(3):\n  for b in zip(loader, range(5)):  # HERE\n    train()", ("zip", "loader", "range", "5")),
        ("while True:\n  yield from islice(loader, size)  # HERE", ("islice", "loader", "size")),
        ("yield from islice(loader, size)  # HERE", ()),
        ("while True:\n  train(zip(batch[:3], weights))  # HERE", ()),
        ("for b in islice(loader, steps - start):  # HERE\n  train()", ()),
        ("for i, b in enumerate(loader):  # HERE\n  train()\n  if i + 1 == size: break", ("size", "1")),
        ("for i, b in enumerate(loader, start):  # HERE\n  train()\n  if i + 1 == size: break", ()),
        ("for i, b in enumerate(loader):  # HERE\n  train()\n  if i % 9 == 0: log()", ()),
    ],
)
def test_what_ends_a_pass_that_is_counted_from_where_it_begins(source: str, cut: tuple[str, ...]) -> None:
    assert at_the_mark(source).cut == cut


def test_a_pass_that_is_cut_as_a_whole_one_is_refused_where_only_its_rest_comes() -> None:
    there = LoopCounters(counters={"`epoch`": 1}, cut={"`size`": 6})
    assert not_continued(there, there, there) is None, "captured where a pass ends"
    said = not_continued(there, there, there, within=True)
    assert said is not None and "ends as a whole one does, by `size`: end a pass behind the training" in said
    assert not_continued(there, there, LoopCounters(there.counters, cut={"`size`": 4}), within=True) is None


def test_integers_are_read_from_variables_attributes_and_elements_and_nothing_is_called() -> None:
    class Trap:
        @property
        def step(self) -> int:
            raise AssertionError("called")

    state, trap, own, done = {"step": 5}, Trap(), SimpleNamespace(age=7), False
    seen = LoopCounters()
    while state["step"] < 6 and own.age < 8 and not done and (own.age or trap.step):
        seen = loop_counters()
        state["step"] += 1
    name = "test_integers_are_read_from_variables_attributes_and_elements_and_nothing_is_called()"
    assert seen == LoopCounters({f"`state['step']` in {name}": 5, f"`own.age` in {name}": 7})


def test_what_a_progress_bar_counts_is_its_own_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, shown = [], 0
    for at in range(2):
        monkeypatch.setattr(loop_counters_module, "is_installed", lambda file, at=at: not at and file == __file__)
        seen += [loop_counters()]
        shown += 2
    name = "test_what_a_progress_bar_counts_is_its_own_matter()"
    own = [  # not what a test runner's own loop carries on
        [{key: value for key, value in found.items() if key.endswith(name)} for found in (one.counters, one.deciding)]
        for one in seen
    ]
    assert own[0] == [{f"`at` in {name}": 0}, {}]
    assert own[1] == [{f"`at` in {name}": 1}, {f"`shown` in {name}": 2, f"`seen` in {name}": "a list of 1"}]


FIRST = LoopCounters({"`step`": 0, "`total`": 9}, {"`n`": 9}, {"`age`": 0})
VERSION = LoopCounters({"`step`": 4, "`total`": 9}, {"`n`": 9}, {"`age`": 3}, {"`number`": 2})


@pytest.mark.parametrize(
    ("now", "ended", "why"),
    [
        (LoopCounters({"`step`": 4, "`total`": 9}), False, None),
        (LoopCounters({"`step`": 4, "`total`": 20}), False, None),
        (LoopCounters({"`step`": 0, "`total`": 9}), False, "`step` is 0, and was 4 when that version was captured"),
        (LoopCounters({"`step`": 3, "`total`": 9}), False, "`step` is 3, and was 4 when that version was captured"),
        (LoopCounters({"`step`": 5}), True, None),  # the version has the counter of its last iteration
        (LoopCounters({"`step`": 0}), True, "`step` is 0, and was 4 when that version was captured"),
        (LoopCounters({}, {"`n`": 9}), False, "it runs as often as at the job's start (`n`), and has no counter"),
        (LoopCounters({}, {"`n`": 5}), False, None),
        (LoopCounters(), False, None),
    ],
)
def test_counters_that_have_moved_must_be_where_they_were(now: LoopCounters, ended: bool, why: str | None) -> None:
    assert not_continued(FIRST, VERSION, now, ended) == why


@pytest.mark.parametrize(
    ("age", "within", "what"),
    [
        (3, False, None),
        (0, False, "`age` is 0, and was 3 when that version was captured"),
        (3, True, "`number` begins at 0, and was 2 when that version was captured"),
        (0, True, "`age` is 0, and was 3 when that version was captured; `number` begins at 0, and was 2 when that "
        "version was captured"),
    ],
)  # fmt: skip
def test_what_decides_something_in_the_loop_is_named(age: int, within: bool, what: str | None) -> None:
    now = LoopCounters({"`step`": 4}, {}, {"`age`": age})
    assert decided_otherwise(FIRST, VERSION, now, within) == what
    assert decided_otherwise(FIRST, VERSION, now, within, ignored={"age", "number"}) is None


def test_a_counter_is_passed_over_by_its_name() -> None:
    first, version = (LoopCounters({"`step` in train()": value}) for value in (0, 4))
    assert not_continued(first, version, first) is not None
    assert not_continued(first, version, first, ignored={"step"}) is None


@pytest.mark.parametrize(
    ("head", "body", "indices"),
    [
        ("number, batch in enumerate(loader)", "if (number + 1) % 3 == 0: evaluate()", ("number",)),
        (
            "number, batch in enumerate(loader, first)",
            "if (number + 1) % 3 == 0: evaluate()",
            (),
        ),  # the script's matter
        ("number, batch in enumerate(loader)", "print(number)", ()),
        ("batch in loader", "if batch: evaluate()", ()),
    ],
)
def test_an_index_that_begins_at_zero_again_counts_if_something_is_decided_by_it(
    head: str, body: str, indices: tuple[str, ...]
) -> None:
    code = at_the_mark(f"for epoch in epochs:\n    for {head}:  # HERE\n        {body}\n")
    assert (code.counters, code.indices) == (("epoch",), indices)


class Noting:
    """Notes what ends a pass, before each batch."""

    cut: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[int]:
        for number in range(3):
            self.cut = {name.split("`")[1]: value for name, value in loop_counters().cut.items()}
            yield number


class Loader(Noting):
    """Of unknown length."""


class Batches(Noting, list[int]):
    def __init__(self) -> None:
        super().__init__(range(3))


def cut_of(body: str, loader: Noting | None = None, **values: object) -> Mapping[str, int]:
    """What ends the pass of a loop over batches with this body."""
    over = values.pop("over", "loader")
    source = f"for e in range(1):\n  for i, b in enumerate({over}):\n" + indent(dedent(body), "    ")
    file = f"<{body} {over} {values}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    loader = Loader() if loader is None else loader
    exec(compile(source, file, "exec"), {"__name__": "script", "loader": loader, **values})
    return loader.cut


@pytest.mark.parametrize(
    ("body", "values", "cut"),
    [
        ("if i % every == 0:\n  if dry_run: break", {"every": 2, "dry_run": False}, {}),
        ("if i % every == 0:\n  if dry_run and e > 9: break", {"every": 2, "dry_run": 0}, {}),
        ("if i % every == 1:\n  if dry_run: break", {"every": 2, "dry_run": True}, {"every": 2, "1": 1}),
        ("if debug and i >= 10: break", {"debug": False}, {}),
        ("if debug and i >= 2: break", {"debug": True}, {"2": 2}),
        ("if most > 0 and i + 1 >= most: break", {"most": -1}, {}),
        ("if most is not None and i + 1 >= most: break", {"most": None}, {}),
        ("if most > 0 and i + 1 >= most: break", {"most": 2}, {"most": 2, "0": 0, "1": 1}),
        ("if i % 9 == 8:\n  for v in range(4):\n    if v > 2: break", {}, {}),
        ("if i == 1:\n  for v in range(4):\n    if v > 2: continue\n  else: break", {}, {"1": 1}),
        ("if not whole:\n  if i == 1: break\nelse: pass", {"whole": True}, {}),
        ("if whole: pass\nelif i == 1: break", {"whole": True}, {}),
        ("if i == 1:\n  done = True\nif done: break", {"done": False}, {"1": 1}),
        ("quiet = i < 9\nif i == 1:\n  if quiet: break", {"quiet": False}, {"1": 1}),
    ],
)
def test_a_count_ends_no_pass_where_the_tests_around_it_cannot_hold(
    body: str, values: dict[str, object], cut: dict[str, int]
) -> None:
    """As `if args.dry_run: break` in torch's own example; a `break` of an evaluation's loop leaves that one."""
    assert cut_of(body, None, **values) == cut


@pytest.mark.parametrize(
    ("body", "values", "cut"),
    [
        ("if i >= 10**9: break", {}, {}),
        ("if i > most - 1: break", {"most": 3}, {}),
        ("if i == 2 * most:\n  break", {"most": 2}, {}),
        ("if i >= 2: break", {}, {"2": 2}),
        ("if i > 1: break", {}, {"1": 1}),
        ("if i == 2: break", {}, {"2": 2}),
        ("if i >= most: break\nmost -= 1", {"most": 3}, {"most": 1}),
        ("i += 10**6\nif i >= 10**6: break", {}, {"10": 10, "6": 6}),
        ("if i != 10**9: break", {}, {"10": 10, "9": 9}),
    ],
)
def test_a_count_beyond_the_length_of_the_data_ends_no_pass(
    body: str, values: dict[str, object], cut: dict[str, int]
) -> None:
    assert cut_of(body, Batches(), **values) == cut


@pytest.mark.parametrize("over", ["iterable=loader", "*[loader]"])
def test_a_pass_whose_data_are_not_named_by_place_has_its_count_compared_all_the_same(over: str) -> None:
    assert cut_of("if i >= 10**9: break", Batches(), over=over) == {"10": 10, "9": 9}


def test_a_length_that_fails_is_unknown() -> None:
    class Sampler(torch.utils.data.SequentialSampler):
        def __len__(self) -> int:
            raise RuntimeError("not yet known")

    data = list(range(3))
    loader = torch.utils.data.DataLoader(data, sampler=Sampler(data))  # type: ignore[arg-type, var-annotated]
    assert loop_counters_module._length(loader) is None


def test_what_is_read_from_a_clock_neither_ends_nor_decides_a_loop() -> None:
    source = """
        while step < steps:
            now = time.time()
            elapsed: int = int(now - start)
            if elapsed > limit: break
            step = step + (1 if time.time() else 2)  # HERE
            self.logged = perf_counter()
            best = train(elapsed)
    """
    code = at_the_mark(source)
    assert code.counters == ("step", "steps", "limit") and code.deciding == ("best",)
