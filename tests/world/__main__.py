"""Worlds from the command line, from the root of the repository:

    python -m tests.world                    jobs of fresh seeds for a minute, on all processors
    python -m tests.world --seconds 3600     for an hour
    python -m tests.world --first 1 --count 200    those of these seeds
    python -m tests.world 28                 the job of one seed, with its transcript
    python -m tests.world FILE               a scenario that failed, as it was kept
    python -m tests.world --bugs             bugs put back: each has to be found

A violation is made smaller (faults, iterations, nodes taken away, as long as it stays), printed with its seed and a
transcript of at most a page, and kept in build/world/.
"""

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names are iterated in the order of their hashes
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.world", *sys.argv[1:]])

import argparse  # noqa: E402
import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import gc  # noqa: E402
import io  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402

from . import wiring  # noqa: E402, F401, I001  # first: it replaces what the product imports
from .bugs import BUGS  # noqa: E402
from .scenario import Scenario, draw, smaller  # noqa: E402
from .shims import _MONOTONIC  # noqa: E402
from .world import World  # noqa: E402

KEPT = Path(__file__).resolve().parents[2] / "build" / "world"
PAGE = 60  # lines
SHRINK_SECONDS = 20.0
FIGURES = ("nodes", "iterations", "faults", "rounds", "seconds", "steps")


def run(scenario):
    """The world, once its job is over, and what the product printed."""
    world = World(scenario)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        world.run()
    return world


def shrunk(scenario, name):
    """A smaller scenario that is violated in the same way."""
    until = _MONOTONIC() + SHRINK_SECONDS
    found = True
    while found and _MONOTONIC() < until:
        found = False
        for other in smaller(scenario):
            if any(each[1] == name for each in run(other).outcome.violations):
                scenario, found = other, True
                break
            if _MONOTONIC() > until:
                break
    return scenario


def shown(world, lines=PAGE):
    """The last of what happened."""
    print(world.scenario)
    notes = [(when, text) for when, text in world.outcome.notes if lines > PAGE or "exchange.started" not in text]
    for when, text in notes[-lines:]:
        print(f"{when:9.3f} {text[:230]}")
    for error in world.tracebacks:
        traceback.print_exception(error)
    for when, name, words in world.outcome.violations:
        print(f"violated after {when:.3f} s: {name}: {words}")


def report(seed, world):
    """A violation, made smaller."""
    name = world.outcome.violations[0][1]
    small = run(shrunk(world.scenario, name))
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / f"{seed}.json"
    kept.write_text(json.dumps(small.scenario.plain(), indent=1))
    print(f"seed {seed}: {name}; again, as it was: python -m tests.world {seed}; smaller: python -m tests.world {kept}")
    shown(small)
    sys.stdout.flush()


def work(seeds, until, pipe, most):
    """One process: jobs of these seeds."""
    gc.disable()
    gc.freeze()
    bad, figures = 0, {name: [] for name in FIGURES}
    for seed in seeds:
        if _MONOTONIC() > until or bad >= most:
            break
        world = run(draw(seed))
        for name, number in zip(FIGURES, world.figures(), strict=True):
            figures[name].append(number)
        if world.outcome.violations:
            bad += 1
            report(seed, world)
        del world
        if len(figures["nodes"]) % 20 == 0:
            gc.collect()
    os.write(pipe, json.dumps([bad, figures]).encode())


def many(chosen):
    """Jobs on all processors; the number of violations."""
    began = _MONOTONIC()
    first = chosen.first if chosen.first is not None else int.from_bytes(os.urandom(4), "big")
    last = first + (chosen.count or 1 << 30)
    print(f"seeds from {first}", flush=True)
    children = []
    for worker in range(chosen.workers):
        ours, theirs = os.pipe()
        if not (child := os.fork()):
            os.close(ours)
            work(range(first + worker, last, chosen.workers), began + chosen.seconds, theirs, chosen.most)
            os._exit(0)
        os.close(theirs)
        children.append((child, ours))
    bad, figures = 0, {name: [] for name in FIGURES}
    for child, pipe in children:
        with os.fdopen(pipe, "rb") as file:
            some, parts = json.loads(file.read())
        os.waitpid(child, 0)
        bad += some
        for name in FIGURES:
            figures[name] += parts[name]
    spent, count = _MONOTONIC() - began, len(figures["nodes"])
    print(f"{count} jobs in {spent:.1f} s, {60 * count / spent:.0f} a minute; violated: {bad}")
    for name, numbers in figures.items():
        numbers.sort()
        middle, most = numbers[count // 2], numbers[count * 9 // 10]
        print(f"  {name}: median {middle:.0f}, nine of ten up to {most:.0f}, {numbers[-1]:.0f}")
    return bad


def bugs(chosen):
    """Whether each bug is found within `--seconds`: by the job that is known for it, or by others, if the product has
    changed meanwhile. The number of those that are not."""
    missed = 0
    for name, bug in BUGS.items():
        if not (child := os.fork()):
            began, tried = _MONOTONIC(), 0
            bug.put_back()
            seeds = itertools.count(chosen.first or 1)
            if isinstance(bug.job, int):
                jobs = map(draw, seeds if chosen.first else itertools.chain([bug.job], seeds))
            else:
                jobs = itertools.chain([bug.job], (dataclasses.replace(bug.job, seed=seed) for seed in seeds))
            for scenario in jobs:
                tried += 1
                found = run(scenario).outcome.violations
                if found and bug.finds in ("", found[0][1]):
                    spent = f"{_MONOTONIC() - began:.1f} s, {tried} jobs"
                    print(f"{name}: seed {scenario.seed}, {spent}: {str(found[0])[:150]}", flush=True)
                    os._exit(0)
                if _MONOTONIC() - began > chosen.seconds:
                    break
            print(f"{name}: NOT found in {tried} jobs: {found}", flush=True)
            os._exit(1)
        missed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return missed


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("which", nargs="?")
    parser.add_argument("--first", type=int)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--most", type=int, default=3, help="violations of a worker, after which it ends")
    parser.add_argument("--lines", type=int, default=PAGE)
    parser.add_argument("--bugs", action="store_true")
    parser.add_argument("--bug", choices=BUGS)
    chosen = parser.parse_args()
    if chosen.bug:
        BUGS[chosen.bug].put_back()
    if chosen.bugs:
        sys.exit(bugs(chosen))
    if chosen.which is None:
        sys.exit(bool(many(chosen)))
    known = chosen.which.isdecimal()
    world = run(draw(int(chosen.which)) if known else Scenario.of(json.loads(Path(chosen.which).read_text())))
    shown(world, chosen.lines)
    print(world.outcome.ended)
    sys.exit(bool(world.outcome.violations))


if __name__ == "__main__":
    main()
