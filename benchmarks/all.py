"""Run all benchmarks, one after another, and write their table: docs/results.md, and the five lines of README.

    python benchmarks/all.py [--quick] [--only NAME ...] [--output FOLDER]

Each keeps its last line and its pictures in a folder of FOLDER (default build/benchmarks), so that another run with
--only replaces only those. What one of them needs and is missing is named before the first begins; the others run.
Status 1 if one failed. With --quick that folder is in FOLDER/quick: the table has its figures where there are no
others, and says that they were measured less often. What FOLDER does not have stays in the table as it was. With
--smoke the table is written to FOLDER.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ft_plugins.rehearse.driver import raising_signals
from workloads.results import headlines, page
from workloads.running import BENCHMARKS, ROOT, Figures, arguments, duration, last_line, seconds_left

FOLDER = ROOT / "build" / "benchmarks"
PAGE, PICTURES, README = ROOT / "docs" / "results.md", ROOT / "docs" / "pictures", ROOT / "README.md"
MARKED = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)


def ready(names: Sequence[str], smoke: bool) -> list[str]:
    """Those that this machine can run. Prints what the others need."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        reasons.setdefault(BENCHMARKS[name].missing(smoke), []).append(name)
    for reason, lacking in reasons.items():
        if reason:
            print(f"left out: {', '.join(lacking)}: {reason}", flush=True)
    return [name for name in names if name in reasons.get("", ())]


def measure(names: Sequence[str], words: Sequence[str], folder: Path) -> Figures:
    """Run them; returns the seconds of each, and whether all ended well."""
    expected = [BENCHMARKS[name].quick if words else BENCHMARKS[name].seconds for name in names]
    began, took, failed = time.monotonic(), Figures(), []
    for number, name in enumerate(names):
        started, done = time.monotonic(), sum(expected[:number])
        left = seconds_left(sum(expected), sum(expected), done, started - began, expected[number], 0.0)
        print(f"== {number + 1} of {len(names)}: {name}; about {duration(left)} left for all", flush=True)
        script_words = [str(ROOT / "benchmarks" / f"{name}.py"), "--output", str(folder / name), *words]
        with subprocess.Popen([sys.executable, *script_words]) as script:
            try:
                status = script.wait()
            except BaseException:
                script.terminate()  # it removes its nodes and networks
                raise
        if status:
            print(f"{name} ended with status {status}; its figures are those of an earlier run, if there was one")
            failed.append(name)
        took[f"{name}_seconds"] = time.monotonic() - started
    return {**took, "all_ended_well": not failed}


def write(folder: Path, smoke: bool) -> Path:
    """Write the table from the last lines in `folder`, and from those of quick runs for what is not there; returns the
    page."""
    folders = [path.parent for pattern in ("quick/*/*.json", "*/*.json") for path in sorted(folder.glob(pattern))]
    measured = {path.name: path for path in folders if (path / f"{path.name}.json").exists()}  # the last: not quick
    lines = {name: json.loads((path / f"{name}.json").read_text()) for name, path in sorted(measured.items())}
    drawn = [path for _, each in sorted(measured.items()) for path in sorted(each.glob("*.png"))]
    if smoke:
        (folder / "results.md").write_text(page(lines))
        return folder / "results.md"
    for path in drawn:
        (PICTURES / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, PICTURES / path.parent.name / path.name)
    text = page(lines, [f"pictures/{path.parent.name}/{path.name}" for path in drawn], PAGE.read_text())
    PAGE.write_text(text)
    README.write_text(MARKED.sub(lambda _: f"{headlines(text)}\n", README.read_text()))
    return PAGE


def main() -> None:
    parser = arguments(__doc__, "all of them quick")
    names = list(BENCHMARKS)
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="these; none: write the table")
    chosen = parser.parse_args()
    folder = chosen.output or FOLDER
    words = [f"--{name}" for name in ("quick", "smoke") if getattr(chosen, name)]
    figures = measure(ready(chosen.only, chosen.smoke), words, folder / "quick" if words == ["--quick"] else folder)
    print(f"the table: {write(folder, chosen.smoke)}")
    print(last_line("all", figures, bool(words)))
    sys.exit(0 if figures["all_ended_well"] else 1)


if __name__ == "__main__":
    with raising_signals():
        main()
