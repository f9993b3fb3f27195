"""Run all benchmarks, one after another, and publish their figures: docs/results.md, and the headlines of README.

    python benchmarks/all.py [--quick] [--only NAME ...] [--output FOLDER] [--against PATH [--pairs N]]

A whole run puts the last line of each benchmark, with the commit, into benchmarks/baseline.json, from which the table
is made; so it may be done in parts, on several days. --only without a name writes the table again. What one of them
needs and is missing is named before the first begins; the others run. Status 1 if one failed. Last lines and pictures
are kept in a folder each of FOLDER (default build/benchmarks); with --quick and --smoke the table is written there too,
and nothing is published.

--against FILE compares the figures with an earlier run's, such as benchmarks/baseline.json: one ratio a figure.
--against CHECKOUT runs each benchmark N times (default 5) in this checkout and in that one, which has a .venv of its
own, in random order, and publishes nothing: a figure is worse if the 95% interval of its ratios lies beyond 1.05, which
gives status 1.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_plugins.rehearse.driver import raising_signals
from workloads.against import compared
from workloads.result_rows import ROWS
from workloads.results import headlines, page
from workloads.running import BENCHMARKS, ROOT, Figures, arguments, duration, last_line, seconds_left

FOLDER, BASELINE = ROOT / "build" / "benchmarks", ROOT / "benchmarks" / "baseline.json"
PAGE, PICTURES, README = ROOT / "docs" / "results.md", ROOT / "docs" / "pictures", ROOT / "README.md"
MARKED = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)
LastLines = dict[str, dict[str, Any]]


def ready(names: Sequence[str], smoke: bool) -> list[str]:
    """Those that this machine can run. Prints what the others need."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        reasons.setdefault(BENCHMARKS[name].missing(smoke), []).append(name)
    for reason, lacking in reasons.items():
        if reason:
            print(f"left out: {', '.join(lacking)}: {reason}", flush=True)
    return [name for name in names if name in reasons.get("", ())]


def run_script(root: Path, name: str, words: Sequence[str], folder: Path) -> int:
    """Run one benchmark of the checkout at `root`; returns its status."""
    python = sys.executable if root == ROOT else str(root / ".venv" / "bin" / "python")
    script_words = [python, str(root / "benchmarks" / f"{name}.py"), "--output", str(folder / name), *words]
    with subprocess.Popen(script_words, cwd=None if root == ROOT else root) as script:
        try:
            return script.wait()
        except BaseException:
            script.terminate()  # it removes its nodes and networks
            raise


def measure(names: Sequence[str], words: Sequence[str], folder: Path) -> Figures:
    """Run them; returns the seconds of each, and whether all ended well."""
    expected = [BENCHMARKS[name].quick if words else BENCHMARKS[name].seconds for name in names]
    began, took, failed = time.monotonic(), Figures(), []
    for number, name in enumerate(names):
        started, done = time.monotonic(), sum(expected[:number])
        left = seconds_left(sum(expected), sum(expected), done, started - began, expected[number], 0.0)
        print(f"== {number + 1} of {len(names)}: {name}; about {duration(left)} left for all", flush=True)
        (folder / name / f"{name}.json").unlink(missing_ok=True)
        if status := run_script(ROOT, name, words, folder):
            print(f"{name} ended with status {status}; its figures are those of an earlier run, if there was one")
            failed.append(name)
        took[f"{name}_seconds"] = time.monotonic() - started
    return {**took, "all_ended_well": not failed}


def measure_pairs(names: Sequence[str], words: Sequence[str], folder: Path, other: Path, pairs: int) -> Figures:
    """Run each in both checkouts, and compare them. Prints all ratios."""
    found, order = Figures(), random.Random(1)
    for name in names:
        lines: list[tuple[LastLines, LastLines]] = []
        for number in range(pairs):
            sides = [("ours", ROOT), ("theirs", other)]
            order.shuffle(sides)
            print(f"== {name}, pair {number + 1} of {pairs}", flush=True)
            folders = {side: folder / f"{side}-{number}" for side, _ in sides}
            ended = [run_script(root, name, words, folders[side]) for side, root in sides]
            if not any(ended):
                lines.append((last_lines(folders["ours"]), last_lines(folders["theirs"])))
        only = [({name: ours[name]}, {name: theirs[name]}) for ours, theirs in lines]
        comparisons = compared(ROWS, only)
        print("\n".join(map(str, comparisons)), flush=True)
        found |= {f"{name}_pairs": len(lines), f"{name}_worse": sum(one.worse for one in comparisons)}
    complete = all(found[f"{name}_pairs"] == pairs for name in names)
    return {**found, "all_ended_well": complete and not any(found[f"{name}_worse"] for name in names)}


def last_lines(folder: Path) -> LastLines:
    """What the benchmarks left in `folder`, by name."""
    paths = [path for path in sorted(folder.glob("*/*.json")) if path.stem == path.parent.name]
    return {path.stem: json.loads(path.read_text()) for path in paths}


def commit_now() -> str:
    """What is measured; asked before the first benchmark begins."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.strip() or "unknown"


def publish(lines: LastLines, folder: Path, commit: str) -> Path:
    """Put the last lines of a whole run into the baseline, and write the table from it; returns the page."""
    baseline: LastLines = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    baseline |= {name: {**line, "commit": commit} for name, line in lines.items()}
    BASELINE.write_text(json.dumps(dict(sorted(baseline.items())), indent=1) + "\n")
    for path in (drawn for name in lines for drawn in sorted((folder / name).glob("*.png"))):
        (PICTURES / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, PICTURES / path.parent.name / path.name)
    pictures = [path for name in baseline for path in sorted((PICTURES / name).glob("*.png"))]
    PAGE.write_text(page(ROWS, baseline, [f"pictures/{path.parent.name}/{path.name}" for path in pictures]))
    README.write_text(MARKED.sub(lambda _: f"{headlines(ROWS, baseline)}\n", README.read_text()))
    return PAGE


def difference(lines: Mapping[str, Mapping[str, Any]], file: Path) -> str:
    """The ratios of `lines` to those of an earlier run, as text."""
    return "\n".join(map(str, compared(ROWS, [(lines, json.loads(file.read_text()))])))


def main() -> None:
    parser = arguments(__doc__, "all of them quick")
    names = list(BENCHMARKS)
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="these; none: write the table")
    parser.add_argument("--against", type=Path, help="an earlier run's file, or another checkout")
    parser.add_argument("--pairs", type=int, default=5, help="of runs in both checkouts (default %(default)s)")
    chosen = parser.parse_args()
    words = [f"--{name}" for name in ("quick", "smoke") if getattr(chosen, name)]
    folder = (chosen.output or FOLDER) / "-".join(["", *(word.strip("-") for word in words)]).strip("-")
    runnable, commit = ready(chosen.only, chosen.smoke), commit_now()
    if chosen.against is not None and chosen.against.is_dir():
        figures = measure_pairs(runnable, words, folder, chosen.against.resolve(), chosen.pairs)
    else:
        figures = measure(runnable, words, folder)
        lines = {name: line for name, line in last_lines(folder).items() if name in runnable}
        if words:
            (folder / "results.md").write_text(page(ROWS, lines))
        print(f"the table: {folder / 'results.md' if words else publish(lines, folder, commit)}")
        if chosen.against is not None:
            print(difference(lines, chosen.against))
    print(last_line("all", figures, bool(words)))
    sys.exit(0 if figures["all_ended_well"] else 1)


if __name__ == "__main__":
    with raising_signals():
        main()
