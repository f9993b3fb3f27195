"""Worlds from the command line: python -m tests.world SEED, or --seconds 60 [--from SEED]."""

from __future__ import annotations

import argparse
import time
import traceback

from .shims import _MONOTONIC
from .world import World, draw


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--tail", type=int, default=60)
    parser.add_argument("--bug")
    chosen = parser.parse_args()
    if chosen.bug:
        from .bugs import BUGS

        BUGS[chosen.bug]()
    if chosen.seed is not None:
        world = World(draw(chosen.seed))
        print(world.scenario)
        outcome = world.run()
        for when, text in outcome.notes[-chosen.tail :]:
            print(f"{when:9.3f} {text}")
        for error in world.tracebacks:
            traceback.print_exception(error)
        print(outcome.violations, outcome.ended, outcome.seconds, outcome.steps)
        return
    began, bad, ends, figures = _MONOTONIC(), 0, {}, {}
    for seed in range(chosen.first, chosen.first + chosen.count):
        world = World(draw(seed))
        outcome = world.run()
        for name, number in (
            ("nodes", world.nodes), ("iterations", world.highest), ("faults", world.struck),
            ("rounds", len(world.gangs)), ("seconds", outcome.seconds), ("steps", outcome.steps),
        ):  # fmt: skip
            figures.setdefault(name, []).append(number)
        how = "; ".join(sorted({result[:60] for result in outcome.ended.values()}))
        ends[how] = ends.get(how, 0) + 1
        if outcome.violations:
            bad += 1
            print(seed, outcome.violations[0])
            if chosen.bug:
                break
    spent = _MONOTONIC() - began
    print(f"{seed - chosen.first + 1} jobs in {spent:.1f} s, {bad} violated; {60 * chosen.count / spent:.0f} a minute")
    for name, numbers in figures.items():
        numbers.sort()
        print(f"{name}: median {numbers[len(numbers) // 2]:.0f}, largest {numbers[-1]:.0f}")
    for how, count in sorted(ends.items(), key=lambda one: -one[1]):
        print(f"{count:6} {how}")


if __name__ == "__main__":
    main()
