"""Divide what `--all` adds to the default tests into parts of about a quarter of an hour, by whole files.

    python tests/harness/parts.py                the part that belongs to the commit, as K/N for tests/run.sh --part
    python tests/harness/parts.py RESULTS.xml    measure again: tests/run.sh --part 1/1 --junitxml=RESULTS.xml

Invariant: the parts follow from durations.txt and the names of files that it does not have, so they are the same
wherever a commit is tested. The commit's hash says which one is run with it: all are, every few commits.

In: rough seconds by file. Out: files by part.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

T = TypeVar("T")
TESTS = Path(__file__).resolve().parents[1]
DURATIONS = TESTS / "durations.txt"
SECONDS = 900  # of a part, roughly
LONGEST = 1800  # seconds after which a part begins no further test
_UNKNOWN = 60.0  # seconds of a file that has none yet
_HEAD = "# Rough seconds of what each file adds with --all, on two idle cores; written by tests/harness/parts.py.\n"


def durations() -> dict[str, float]:
    """Rough seconds by file, from durations.txt."""
    lines = [line.split() for line in DURATIONS.read_text().splitlines() if not line.startswith("#")]
    return {file: float(seconds) for file, seconds in lines}


def number_of_parts(seconds: Mapping[str, float]) -> int:
    """How many parts there are."""
    return max(1, round(sum(seconds.values()) / SECONDS))


def divide(seconds: Mapping[str, float], number: int) -> list[list[str]]:
    """The files of each part: the longest first, each into the part that is shortest so far."""
    parts: list[list[str]] = [[] for _ in range(number)]
    totals = [0.0] * number
    for file in sorted(seconds, key=lambda one: (-seconds[one], one)):
        shortest = totals.index(min(totals))
        parts[shortest].append(file)
        totals[shortest] += seconds[file]
    return parts


def files_of(part: str, others: Iterable[str]) -> frozenset[str]:
    """The files of a part given as K/N, 1 to N. `others`: files that may not be in durations.txt. Raises ValueError."""
    place, _, number = part.partition("/")
    if not (place.isdigit() and number.isdigit() and 1 <= int(place) <= int(number)):
        raise ValueError(f"--part {part}: expected K/N with K from 1 to N")
    known = durations()
    seconds = {**dict.fromkeys(others, _UNKNOWN), **known}
    return frozenset(divide(seconds, int(number))[int(place) - 1])


def part_of(commit: str, number: int) -> str:
    """The part that belongs to a commit's hash, as K/N."""
    return f"{int(commit, 16) % number + 1}/{number}"


def rotated(tests: list[T], file_of: Callable[[T], str], commit: str) -> list[T]:
    """The tests of a part, by whole files, begun at one that follows from the commit: a part that is cut off at LONGEST
    is cut off elsewhere the next time."""
    files = list(dict.fromkeys(map(file_of, tests)))
    first = int(commit, 16) // number_of_parts(durations()) % max(1, len(files))
    place = {file: at for at, file in enumerate([*files[first:], *files[:first]])}
    return sorted(tests, key=lambda test: place[file_of(test)])


def head() -> str:
    """The commit's hash; 0 without a repository."""
    words = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    found = subprocess.run(words, cwd=TESTS, capture_output=True, text=True)
    return found.stdout.strip() or "0"


def measured(results: Path) -> dict[str, float]:
    """Seconds by file of what pytest's XML has; tests that were skipped do not count."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(results).iter("testcase"):
        if case.find("skipped") is None:
            seconds[f"{str(case.get('classname')).replace('.', '/')}.py"] += float(case.get("time", 0))
    return dict(seconds)


def main() -> None:
    if len(sys.argv) > 1:
        seconds = {**durations(), **measured(Path(sys.argv[1]))}  # what was skipped for lack of a framework stays
        DURATIONS.write_text(_HEAD + "".join(f"{file} {each:.0f}\n" for file, each in sorted(seconds.items())))
        return
    print(part_of(head(), number_of_parts(durations())))


if __name__ == "__main__":
    main()
