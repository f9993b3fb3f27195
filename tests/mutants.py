"""Strength of tests: change a pure module in one small place at a time, and see whether its own tests notice.

    python tests/mutants.py [--sample N] [--seed S] [--world] [name of a module ...]

Prints what no test noticed, as differences. With --world, what its own tests did not notice has to be noticed by some
jobs of `tests/world`, where the module is one of those that run there.

Each mutant runs in a forked process, in which an import of the module loads the changed source; no file is changed.
Operators are those of cosmic-ray; a sample of mutants stands for a module, the same for the same seed. Changes
inside annotations, of the arguments of `@dataclass` and of `strict=` are left out: those are checks themselves. At
least `WANTED` of the others have to be noticed, those that `EXPLAINED` lists aside, which change nothing that can be
seen.
"""

import argparse
import ast
import difflib
import importlib.abc
import importlib.util
import io
import os
import random
import select
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAMPLE = 25
WORLDS = range(1, 41)  # seeds of the jobs
WANTED = 0.9  # of the mutants of a module
_LONGEST = 1800.0  # seconds for the tests of a module; some ten on an idle core
MODULES = {  # of ft_plugins: the files of tests/unit that are its own
    "smp.tree.agreement": ("smp/test_standstill.py", "smp/test_agreement.py"),
    "smp.tree.node_step": ("smp/test_node_step.py", "smp/test_standstill.py"),
    "smp.tree.tree_state": ("smp/test_standstill.py", "smp/test_tree_state.py"),
    "smp.watch.hang": ("smp/test_hang.py",),
    "smp.tree.standstill": ("smp/test_standstill.py",),
    "launcher.agent.restarts": ("launcher/test_restarts.py",),
    "launcher.rounds.rounds": ("launcher/test_rounds.py",),
    "launcher.rounds.round_machine": ("launcher/test_rounds.py", "launcher/test_round_machine.py"),
    "snapshot.segment.slots": ("snapshot/test_slots.py", "snapshot/test_claims.py", "snapshot/test_certified.py"),
    "snapshot.capture.layout": ("snapshot/test_layout.py",),
    "recovery.recovery_plan": ("recovery/test_plan.py",),
    "redundancy.parity": ("redundancy/test_parity.py",),
    "sync.rounds.penalty": ("sync/test_penalty.py",),
    "sync.rounds.local_policy": ("sync/test_local_policy.py",),
}

EXPLAINED = {  # by the changed line: why no test can notice
    "if max(after) - min(after) > 1 and len(at) != 1:": "there is at least one",
    "if len(last) is not LIVES or len(signatures) > 1 or None in signatures:": "these are `LIVES` at most",
    "-\n-    @overload": "for type checkers",
    "target: int = 1": "read only where it is given",
    "PARTS = 5  # what a node is to store of it is not complete": "only the order counts",
    "begun = max(base.iteration if base else -1, summary.begun)": "no iteration is negative",
    "if summary.late is not None and summary.late >= missed and (committed is None or missed > committed):": (
        "what a node was late for, it missed"
    ),
    "left = [rank for rank in behind or ranks if rank.iteration <= earliest]": "none is earlier",
    "return [] if len(found) >= len(ranks) else found": "found are some of the ranks",
    "if stopped <= -1:": "a negative time moves none on",
    "self._summary, self._changed = Summary(), False": "nothing is there to be merged",
    "failures: int = 1": "it is used from the second one on",
    "back = sum(each.seat is not None and each.seat.round >= last for each in candidates)": "the last is newest",
    "newest = [each for each in seated if each.seat and each.seat.round >= last]": "the last is newest",
    "return writing is None or version.lineage != writing.lineage or version.iteration + 2 <= writing.iteration": (
        "no lineage is newer than that of the version being captured"
    ),
    "clean = sorted((s.version for s in slots if s.state >= SlotState.CLEAN and s.version), reverse=True)": (
        "a slot without memory has no version"
    ),
    "clean = sorted((s for s in slots if s.state >= SlotState.CLEAN and s.version), "
    "key=lambda s: s.version or version)": ("a slot without memory has no version"),
    "return (restorable, slot.version if restorable or slot.version else Version(0, 0), slot.index)": (
        "any slot that cannot be restored does"
    ),
    "_PAUSE_SECONDS = 2.0  # maximum between two steps; if they are further apart, this process was stopped": "or so",
    "stopped = max(0.0, now % self._looked - _PAUSE_SECONDS)": "two steps are never as far apart as the clock has gone",
    "for token in []:": "who is watched for too long is watched in vain",
    "return tuple((text, int(number or - 0)) for text, number in parts), name": "the name decides then, as it would",
    "at_least: bool = True": "every plan says it",
    "exchange: ExchangePlan | None = None, plan_digest: int = -1, banned: Collection[Version] = (),": (
        "whoever has an exchange plan gives its digest"
    ),
    'reason = f" ({self.reason})" if self.tier >= "storage" else ""': "no tier comes after it in the alphabet",
    "return same[ -1]": "no two parity slots hold one version",
    "return (restorable, slot.version if restorable and slot.version else Version( 1, 0), slot.index)": (
        "any version does, as long as it is the same for all that cannot be restored"
    ),
}

_SAME = ("no_op", "Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")  # change nothing, or next to nothing


@dataclass(frozen=True)
class Mutant:
    """A changed source of a module, and how it differs from the real one."""

    source: str
    difference: str

    @property
    def explanation(self):
        """Why no test can notice it; '' if one should."""
        return EXPLAINED.get(self.difference.rpartition("\n+")[2].strip(), "")


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Load one module from a changed source."""

    def __init__(self, name, path, source):
        self._name, self._path, self._source = name, path, source

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(self._source, str(self._path), "exec"), vars(module))


def path_of(name):
    """The file of a module of ft_plugins."""
    return ROOT.joinpath("ft_plugins", *name.split(".")).with_suffix(".py")


def mutants(source, count, seed):
    """A sample of `count` mutants of `source`, or all if there are not more. Needs cosmic-ray."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    unseen = _left_out(source)
    places = {}
    for name in sorted(operator_names()):
        if name.endswith(_SAME) or get_operator(name).arguments():  # the last kind needs names, which are not found
            continue
        operator = get_operator(name)()
        found = (at for node in ast_nodes(get_ast(source)) for at in operator.mutation_positions(node))
        for number, (start, _) in enumerate(found):
            if not any(first <= start < last for first, last in unseen):
                places.setdefault(start, []).append((name, number))
    choice, sample = random.Random(seed), list[Mutant]()
    for start in choice.sample(sorted(places), len(places)):  # one change at a place
        name, number = choice.choice(places[start])
        changed = mutate_code(source, get_operator(name)(), number)
        if changed is not None and changed != source and len(sample) < count:
            lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
            sample.append(Mutant(changed, "\n".join(line for line in lines if line[:3] not in ("---", "+++", "@@ "))))
    return sample


def _left_out(source):
    """Where annotations, decorators of classes and `strict=` begin and end, as (line, column)."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
        strict = node.value if isinstance(node, ast.keyword) and node.arg == "strict" else None
        for each in (getattr(node, "annotation", None), getattr(node, "returns", None), strict, *decorators):
            if isinstance(each, ast.expr) and each.end_lineno is not None and each.end_col_offset is not None:
                spans.append(((each.lineno, each.col_offset), (each.end_lineno, each.end_col_offset)))
    return spans


def noticed(name, source, tests, seconds):
    """Whether `tests` fail with `source` as the module `name`; None if they did not end within `seconds`."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        code = 99
        try:
            sys.meta_path.insert(0, _Changed(f"ft_plugins.{name}", path_of(name), source))
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                code = tests()
        finally:
            os._exit(code)
    os.close(writes)
    try:
        ended, _, _ = select.select([reads], [], [], seconds)  # closed by the kernel when the child ends
        if not ended:
            os.kill(child, 9)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(reads)
    return None if not ended else os.waitstatus_to_exitcode(status) != 0


def own_tests(name):
    """The status with which the module's own tests end."""
    import pytest
    from hypothesis import Phase, settings

    settings.register_profile("first", phases=[Phase.explicit, Phase.generate], derandomize=True, database=None)
    settings.load_profile("first")  # that it fails is enough
    words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--all", f"--rootdir={ROOT}"]
    return int(pytest.main([*words, *(str(ROOT / "tests" / "unit" / each) for each in MODULES[name])]))


def worlds():
    """Whether what must hold is violated in a job of `WORLDS`."""
    os.environ["PYTHONHASHSEED"] = "0"  # so that it does not start Python again
    sys.path.insert(0, str(ROOT))
    world = importlib.import_module("tests.world.__main__")
    return int(any(world.run(world.draw(seed)).outcome.violations for seed in WORLDS))


def unnoticed(name, count, seed, in_world):
    """The mutants of a module that its own tests do not notice, nor the worlds if `in_world`, and how many there were.
    One that makes them run ten times as long is noticed. Raises AssertionError if they fail without a change."""
    source = path_of(name).read_text()
    sample = left = mutants(source, count, seed)
    for tests in (lambda: own_tests(name), worlds)[: 1 + in_world]:
        began = time.monotonic()
        unchanged = noticed(name, source, tests, _LONGEST) if left else False
        assert unchanged is not None, f"{name}: its tests have not ended after {_LONGEST:.0f} s without a change"
        assert not unchanged, f"{name}: its tests fail without a change"
        limit = 60 + 10 * (time.monotonic() - began)
        left = [one for one in left if noticed(name, one.source, tests, limit) is False]
    return left, len(sample)


def main():
    """Print what was not noticed. Returns 1 if it is too much of any module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sample", type=int, default=SAMPLE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", action="store_true")
    chosen = parser.parse_args()
    for each in (
        "torch",
        "torch.distributed.elastic.agent.server.api",
        "hypothesis.strategies",
        "pydantic",
        "xdist.dsession",
    ):
        importlib.import_module(each)  # once, for all forked processes; nothing of ft_plugins, which is to be changed

    weak = []
    for name in chosen.names or MODULES:
        left, count = unnoticed(name, chosen.sample, chosen.seed, chosen.world)
        explained = sum(bool(one.explanation) for one in left)
        print(f"{name}: {count - len(left)} of {count} noticed, {explained} explained", flush=True)
        for one in left:
            print(
                "   ", f"{one.difference}  # {one.explanation}".replace("\n", "\n    ").removesuffix("  # "), flush=True
            )
        if len(left) - explained > (1 - WANTED) * (count - explained):
            weak.append(name)
    if weak:
        print(f"expected at least {WANTED:.0%} of the mutants to be noticed; not so: {', '.join(weak)}", flush=True)
    return int(bool(weak))


if __name__ == "__main__":
    sys.exit(main())
