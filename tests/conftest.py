"""Shared by all tests: a separate environment, the switches `--all` and `--part` and the marker `gpu`.

Invariant: no test sees launcher variables of the surrounding environment or writes to the user's run directory.
"""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings
from xdist.scheduler import LoadScopeScheduling

from ft_plugins.events import Events
from harness import parts

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

# dlrover, of the extra [bench], brings a package at whose import torch warns; scripts of tests expect a clean stderr
PYNVML = "ignore:The pynvml package is deprecated:FutureWarning"


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run all tests, not only those in headlines.txt")
    parser.addoption("--rewrite", action="store_true", help="write what comes out into transcripts")
    parser.addoption("--part", metavar="K/N", help="run part K of N of what --all adds, by whole files")


HEADLINES = Path(__file__).with_name("headlines.txt")
WHOLE_JOBS = ("tests/scenarios/", "tests/integration/")


def headlines():
    """Prefixes of the ids of tests that start whole jobs and run by default."""
    lines = HEADLINES.read_text().splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def runs_by_default(item, prefixes):
    """Whether a test runs without `--all`."""
    if item.nodeid.startswith(WHOLE_JOBS):
        return item.nodeid.startswith(prefixes)
    return item.get_closest_marker("all_configurations") is None


def outside(part, items, prefixes):
    """The tests that are not in a part of what `--all` adds; without a part, all that it adds. Raises ValueError."""
    added = [item for item in items if not runs_by_default(item, prefixes)]
    if not part:
        return added
    files = parts.files_of(part, (item.nodeid.partition("::")[0] for item in added))
    chosen = {item for item in added if item.nodeid.partition("::")[0] in files}
    return [item for item in items if item not in chosen]


_BEGUN = time.monotonic()


def pytest_runtest_setup(item):
    part = item.config.getoption("--part")
    if part and time.monotonic() - _BEGUN > parts.LONGEST:
        pytest.skip(f"not begun within {parts.LONGEST} s: bash tests/run.sh --all {item.nodeid.partition('::')[0]}")


def pytest_terminal_summary(terminalreporter, config):
    if part := config.getoption("--part"):
        terminalreporter.write_line(f"part {part} of what --all adds; again: bash tests/run.sh --part {part}")


def draw_fewer(tests):
    """Let tests of properties draw a quarter of their examples; all are drawn with `--all`."""
    for test in filter(is_hypothesis_test, tests):  # as hypothesis' own plugin changes the settings of a test
        full = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = settings(full, max_examples=max(10, full.max_examples // 4))


def pytest_collection_modifyitems(config, items):
    prefixes = headlines()
    unknown = [line for line in prefixes if not any(item.nodeid.startswith(line) for item in items)]
    if unknown and {str(path) for path in config.args} == {"tests"}:  # all tests were collected
        raise pytest.UsageError(f"{HEADLINES}: no test id begins with {unknown}")
    part = config.getoption("--part")
    if part or not config.getoption("--all"):
        try:
            left_out = outside(part, items, prefixes)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            gone = set(left_out)
            items[:] = [item for item in items if item not in gone]
        if part:
            items[:] = parts.rotated(items, lambda item: item.nodeid.partition("::")[0], parts.head())
    if not (part or config.getoption("--all")):
        draw_fewer({item.obj for item in items if isinstance(item, pytest.Function)})
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class ByFile(LoadScopeScheduling):
    """Give each process of a parallel run whole files. Scenarios of one framework stay together, because they share a
    fork server and golden runs. On two cores (three processes) whole jobs run one at a time: two would starve each
    other's ranks."""

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        if nodeid.startswith(WHOLE_JOBS) and self.numnodes <= 3:
            return "whole jobs"
        if not path.startswith("tests/scenarios/"):
            return path
        return "scenarios of DeepSpeed" if "deepspeed" in nodeid else "other scenarios"


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False  # in the order of collection: jobs first, for they take longest
    return ByFile(config, log)


def _has_gpu():
    import torch

    return torch.cuda.is_available()


def pytest_configure():
    Events.strict = True  # an undeclared event is an error, also in forked processes
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job; children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_environment():
    """Put run directories into a short folder of this session (socket paths are bounded); unset launcher variables."""
    folder = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("PYTHONWARNINGS", PYNVML)
        for name in list(os.environ):
            if name in LAUNCHER or name.startswith(("FTP_", "SLURM_", "TORCHELASTIC_")):
                patch.delenv(name)
        yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tmp_path(tmp_path_factory):
    """pytest's, with a short name: sockets lie in run directories in it, and their paths are bounded."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(autouse=True)
def own_notices():
    """What a test ignores or blocks, as ranks do with notices of preemption, is not so in what later tests start."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
