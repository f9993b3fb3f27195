"""Run the exactness tests against other versions of the frameworks, without changing the installation.

Invariant: a version's tests run only after the interpreter has confirmed that it finds this version. Another framework
version is an overlay, a folder with one distribution, first on PYTHONPATH; another torch is a separate environment.
Both are made once, in the user's cache. A mode that fails even without protection does not count against this project;
this is decided from the test's own report, not from a list. A version that cannot run gives one line with the reason.
A checkout runs unmodified in its place; Megatron compiles its data set helpers in it.

In: versions, as `deepspeed-0.18.9` or `deepspeed-0.18.9+torch-2.10.0`, without a number the installed one; folders with
checkouts of Megatron-LM, or of the programs that train a DeepSpeed engine. Out: one line per version and mode, a
Markdown table with one row per version, exit status 1 if a mode failed.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from ft_plugins.errors import FtError
from ft_plugins.patches import MegatronPackage, package_in
from harness.deepspeed_forks import IMPORTED
from harness.megatron_lm import checkouts_in

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ft_plugins" / "matrix"
DEFAULT = (
    *("deepspeed-0.16.9", "deepspeed-0.18.9", "deepspeed"),
    *("megatron-core-0.14.0", "megatron-core-0.15.3", "megatron-core"),
)
MEGATRON_LM = "Megatron-LM"
TESTS = {
    "deepspeed": ("deepspeed", "tests/scenarios/test_deepspeed_exact.py"),  # module, file
    "megatron-core": ("megatron.core", "tests/scenarios/test_megatron_exact.py"),
    MEGATRON_LM: ("megatron.core", "tests/integration/test_megatron_lm_versions.py"),
    "Megatron-DeepSpeed": ("megatron", "tests/integration/test_megatron_deepspeed.py"),
    "gpt-neox": ("megatron", "tests/integration/test_gpt_neox.py"),
}
PATHS = {  # of a checkout, for the tests
    MEGATRON_LM: "MEGATRON_LM_PATH",
    "Megatron-DeepSpeed": "MEGATRON_DEEPSPEED_PATH",
    "gpt-neox": "GPT_NEOX_PATH",
}
PACKAGES = ("deepspeed", "megatron-core")
CELLS = "killed_in_forward"  # of the file: one test per mode
UNPROTECTED = "unprotected"  # property that a test records after the unprotected run of its mode has succeeded
COMPARED = "compared"  # property in which a test records what it compared and what it left out
REASON = 300  # maximum characters of a reason
BEGIN, END = "<!-- versions: written by `tests/matrix.sh --docs` -->", "<!-- end of versions -->"
HEAD = "| framework | torch | Python | modes that end exactly | run on |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Version:
    """A framework's version and the torch that it runs with. '': the installed one."""

    name: str
    number: str = ""
    torch: str = ""
    checkout: Path | None = None  # of Megatron-LM, or of a client of DeepSpeed

    @classmethod
    def of(cls, text):
        """From `name[-number][+torch-number]`. Raises ValueError."""
        match = re.fullmatch(rf"({'|'.join(PACKAGES)})(?:-(\d[\w.]*))?(?:\+torch-(\d[\w.]*))?", text)
        if not match:
            raise ValueError(f"expected {' or '.join(PACKAGES)}, then [-NUMBER][+torch-NUMBER], found '{text}'")
        return cls(*(part or "" for part in match.groups()))

    def __str__(self):
        return " ".join(filter(None, [self.name, self.number]))


def megatron_lm(root):
    """The versions checked out in `root`, or `root` itself. Raises FtError."""
    return [Version(MEGATRON_LM, str(checkout), checkout=checkout.folder) for checkout in checkouts_in(root)]


def clients(root):
    """The checkouts of DeepSpeed's clients in `root`, or `root` itself, labelled with their folders. Raises FtError."""
    folders = [root, *(sorted(root.iterdir()) if root.is_dir() else ())]
    found = [(package_in([folder / "megatron"]), folder.resolve()) for folder in folders]
    versions = [
        Version(package.value, re.sub(r"[^\w.-]", "_", folder.name), checkout=folder)
        for package, folder in found
        if package is not MegatronPackage.MEGATRON_LM
    ]
    if not versions:
        raise FtError(f"{root}: expected a checkout of Megatron-DeepSpeed or gpt-neox, or a folder of them")
    return versions


@dataclass(frozen=True)
class Cell:
    """The verdict on one mode. Neither passed nor failed: it also fails without protection."""

    mode: str
    verdict: str
    passed: bool = False
    failed: bool = False  # by this project


# running


def interpreter(version):
    """The Python with the requested torch and this project's other pins."""
    if version.torch in ("", metadata.version("torch").split("+")[0]):
        return sys.executable
    folder = CACHE / f"torch-{version.torch}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        print(f"installing torch {version.torch} and the other packages into {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pins = (ROOT / "launch" / "constraints.txt").read_text()
        required = metadata.requires("torch") or ()
        (folder / "constraints.txt").write_text(pins_with(pins, version.torch, required))
        index = os.environ.get("FTP_TORCH_INDEX_URL")
        if index:
            pip(python, "--no-deps", "--index-url", index, f"torch=={version.torch}")
        project = f"{ROOT}[megatron,deepspeed,dev]"
        pip(python, "--constraint", str(folder / "constraints.txt"), "--editable", project)
        complete.touch()
    return str(python)


def pins_with(pins, torch, required):
    """The pins with another torch, and without those of the packages that torch requires: it pins some itself."""
    own = {re.split(r"[^\w.-]", each)[0].lower() for each in required}
    others = [line for line in pins.splitlines() if line.partition("==")[0].lower() not in {*own, "torch"}]
    return "\n".join([*others, f"torch=={torch}", ""])


def overlay(version):
    """The folder with this version, or with what a checkout imports, to come first on PYTHONPATH; none for the
    installed version."""
    if version.checkout:
        name, words = f"{version.name}-imports", tuple(IMPORTED.get(PATHS[version.name], ()))
    elif version.number not in ("", metadata.version(version.name)):
        name = f"{version.name}-{version.number}"
        words = ("--no-deps", "--no-build-isolation", f"{version.name}=={version.number}")
    else:
        words = ()
    if not words:
        return []
    folder = CACHE / name
    if not folder.exists():
        building = folder.with_name(f"{folder.name}.building")
        shutil.rmtree(building, ignore_errors=True)
        pip(sys.executable, "--target", str(building), *words)
        building.rename(folder)
    return [str(folder)]


def pip(python, *words):
    quiet = ("--quiet", "--quiet", "--disable-pip-version-check", "--no-input")
    build = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([python, "-m", "pip", "install", *quiet, *words], check=True, env=build, stdin=subprocess.DEVNULL)


ASK = """
import importlib.util, json, sys
from importlib.metadata import version
package, module, *checkout = sys.argv[1:]
sys.path[:1] = checkout or sys.path[:1]  # as when Python runs a script in that folder
number = "" if checkout else version(package)
print(json.dumps([number, version("torch"), importlib.util.find_spec(module).origin]))
"""


def resolved(version, python, first, environment):
    """The version and torch that the tests will import. Raises RuntimeError if they are not the requested ones."""
    module, _ = TESTS[version.name]
    first = [str(version.checkout)] if version.checkout else first
    command = [python, "-c", ASK, version.name, module, *(first if version.checkout else [])]
    query = subprocess.run(command, env=environment, capture_output=True, text=True)
    if query.returncode != 0:
        raise RuntimeError(f"{python} does not find {module}: {(query.stderr.splitlines() or ['no message'])[-1]}")
    reply = json.loads(query.stdout)
    number, torch, origin = reply[0] or version.number, reply[1].split("+")[0], Path(reply[2])
    if version.number not in ("", number) or version.torch not in ("", torch):
        raise RuntimeError(f"expected {version}, but {python} finds {version.name} {number} and torch {torch}")
    if first and not origin.is_relative_to(first[0]):
        raise RuntimeError(f"{module} comes from {origin}, not from {first[0]}")
    return Version(version.name, number, torch, version.checkout)


def run(version):
    """Run and print the modes of one version; a single failed one if the version cannot run."""
    try:
        version, cells, log = modes(version)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        cells, log = [Cell("-", f"FAILED: {one_line(str(error))}", failed=True)], None
    for cell in cells:
        print(f"{version}  torch {version.torch or 'unknown'}  {cell.mode}  {cell.verdict}", flush=True)
    if log and not all(cell.passed for cell in cells):
        print(f"the output of these tests: {log}", file=sys.stderr)
    return version, cells


def modes(version):
    """Run the modes of one version. Also returns the log of the tests, a file in the cache."""
    python, first = interpreter(version), overlay(version)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*first, str(ROOT)]), "PYTHONUNBUFFERED": "1"}
    version = resolved(version, python, first, environment)
    if version.checkout:
        environment[PATHS[version.name]] = str(version.checkout)
    label = f"{version.name}-{version.number}+torch-{version.torch}"
    _, file = TESTS[version.name]
    with tempfile.TemporaryDirectory(prefix="ftm-") as scratch, open(CACHE / f"{label}.log", "w") as log:
        report = Path(scratch) / "report.xml"
        words = ["--all", "-m", "not all_configurations", "-k", CELLS]
        words += ["--junitxml", str(report), "-o", "junit_family=xunit1"]
        words += ["--basetemp", f"{scratch}/runs", "-p", "no:cacheprovider", "--capture=no"]
        command = [python, "-m", "pytest", file, *words]
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ).returncode
        cells = list(verdicts(report.read_text(), version.torch)) if report.exists() else []
    if not cells:
        cells = [Cell("-", f"FAILED: pytest ended with {code} and reported no mode", failed=True)]
    return version, cells, Path(log.name)


# reporting


def verdicts(report, torch):
    """One verdict per test of pytest's report."""
    for case in ElementTree.fromstring(report).iter("testcase"):
        mode = case.get("name", "").rpartition("[")[2].rstrip("]")
        recorded = {one.get("name"): one.get("value") for one in case.iter("property")}
        failure, error, skipped = (case.find(kind) for kind in ("failure", "error", "skipped"))
        if error is not None:
            yield Cell(mode, f"FAILED before the kill: {reason(error)}", failed=True)
        elif failure is not None and UNPROTECTED in recorded:
            yield Cell(mode, f"FAILED: {reason(failure)}", failed=True)
        elif failure is not None:
            yield Cell(mode, f"fails without protection too, with torch {torch}: {reason(failure)}")
        elif skipped is not None:
            yield Cell(mode, f"FAILED: not run: {skipped.get('message')}", failed=True)
        else:
            compared = recorded.get(COMPARED)
            yield Cell(mode, f"passed: {compared}" if compared else "passed", passed=True)


def reason(failure):
    """The first error in the job's output, else pytest's message, in one line."""
    errors = re.findall(r"\b(?!AssertionError)[\w.]*(?:Error|Exception): .*", failure.text or "")
    return one_line((errors or (failure.get("message") or "no message").splitlines())[0])


def one_line(text):
    """The beginning of a message, without line breaks."""
    return " ".join(text.split())[:REASON]


def row(version, cells, day):
    """A row of the table."""
    passed, failed = sum(cell.passed for cell in cells), sum(cell.failed for cell in cells)
    other = len(cells) - passed - failed
    words = [f"{passed} of {len(cells)}"]
    words += [f"{other} fail without protection too"] if other else []
    words += [f"{failed} FAILED"] if failed else []
    return f"| {version} | {version.torch or 'unknown'} | {platform.python_version()} | {'; '.join(words)} | {day} |"


def merged(old, new):
    """The table with the rows of `new` and the rows of `old` for other versions."""

    def key(line):
        framework, torch = (cell.strip() for cell in line.split("|")[1:3])
        name, _, number = framework.partition(" ")
        digits, _, label = number.partition("-")
        return name.lower(), numbers(digits), label, numbers(torch)

    def numbers(text):
        return [int(part) for part in re.findall(r"\d+", text)]

    rows = [line for line in old.splitlines() if re.match(rf"\| ({'|'.join(TESTS)}) ", line)]
    replaced = [key(line) for line in new]
    others = [line for line in rows if key(line) not in replaced]
    return "\n".join([HEAD, *sorted([*others, *new], key=key)])


def write(page, rows):
    """Put `rows` into the table of docs/versions.md."""
    before, begin, rest = page.read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise RuntimeError(f"{page} has no lines '{BEGIN}' and '{END}'")
    page.write_text(f"{before}{BEGIN}\n{merged(old, rows)}\n{END}{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"default, without checkouts: {' '.join(DEFAULT)}")
    roots = "a folder with a checkout of Megatron-LM per tag, or one checkout; may be repeated"
    parser.add_argument("--megatron-lm", type=Path, action="append", metavar="ROOT", default=[], help=roots)
    roots = "a folder with checkouts of Megatron-DeepSpeed and gpt-neox, or one checkout; may be repeated"
    parser.add_argument("--clients", type=Path, action="append", metavar="ROOT", default=[], help=roots)
    parser.add_argument("--docs", action="store_true", help="write the rows of these versions into docs/versions.md")
    args = parser.parse_args()
    try:
        given = args.versions or (() if args.megatron_lm or args.clients else DEFAULT)
        checkouts = [version for root in args.megatron_lm for version in megatron_lm(root)]
        checkouts += [version for root in args.clients for version in clients(root)]
        versions = [*map(Version.of, given), *checkouts]
    except (ValueError, FtError) as error:
        parser.error(str(error))
    CACHE.mkdir(parents=True, exist_ok=True)
    rows, failed = [], False
    for version in versions:
        version, cells = run(version)
        rows.append(row(version, cells, datetime.date.today().isoformat()))
        failed = failed or any(cell.failed for cell in cells)
        if args.docs:
            write(ROOT / "docs" / "versions.md", rows[-1:])
    print("\n" + merged("", rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
