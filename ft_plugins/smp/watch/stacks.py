"""The stacks of a node's ranks, written down before they are killed.

With py-spy, where it is installed and may read other processes; else each rank writes its own on a signal, by Python's
faulthandler: its handler is C code, so it works while the rank sleeps, waits in C code, or keeps the interpreter's lock
for ever. The file is opened in advance, because a rank that hangs may have no descriptor left. A rank that a signal has
stopped handles no other; py-spy reads it all the same.

Invariant: bounded in time; a signal is sent only to a process that listens for it, because it would end any other. A
rank without stacks gets a file that says why.

    <run directory>/stack.R                   the file of rank R, which it opens at start
    <run directory>/hangs/TOKEN/rankR.txt     stacks by incarnation and rank, of the last KEPT incarnations that had
                                              any; a later one of the same rank replaces it

In: run directory, processes by rank. Out: `listen` in a rank; in the SMP `dump`, which returns the folder of stacks,
`of_ranks` and `place`, for ranks that go on, and `forget` at its end.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from ...base.files import make_private, private
from . import liveness

SECONDS = 8.0  # for all ranks of a node together
KEPT = 8  # folders of stacks
_SIGNAL = signal.SIGRTMAX - 3  # scripts and batch systems use SIGUSR1 and SIGUSR2
_POLL_SECONDS = 0.02
_KILLED_SECONDS = 0.5
_QUIET_SECONDS = 0.2  # a file that has not grown for so long is whole
_LIMIT = 1 << 20  # bytes of a file that are kept

Processes = Mapping[int, tuple[int, int]]  # (pid, start time) by rank


def _file_of(run_dir: Path, rank: int) -> Path:
    return run_dir / f"stack.{rank}"


def listen(run_dir: Path, rank: int) -> Callable[[], None]:
    """Write the stacks of this process's threads when asked. Returns what ends that, once. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_APPEND  # `_ask` empties it
    descriptor = os.open(_file_of(run_dir, rank), flags, 0o600)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)

    def end() -> None:
        faulthandler.unregister(_SIGNAL)
        os.close(descriptor)
        with suppress(OSError):
            _file_of(run_dir, rank).unlink(missing_ok=True)

    return end


def forget(run_dir: Path) -> None:
    """Remove the files of ranks that were killed; stacks that were written down stay."""
    for path in run_dir.glob("stack.*"):
        with suppress(OSError):
            path.unlink()


def dump(run_dir: Path, token: int, processes: Processes, seconds: float = SECONDS) -> Path:
    """Write the stacks of all processes to the folder that is returned. Raises OSError if that cannot be made."""
    folder = run_dir / "hangs" / str(token)
    make_private(folder)
    _prune(folder.parent)
    deadline = time.monotonic() + seconds
    spied = _by_py_spy(folder, processes, time.monotonic() + seconds / 2)
    rest = {rank: process for rank, process in processes.items() if rank not in spied}
    refused = {rank: _ask(run_dir, rank, *process) for rank, process in rest.items()}
    for rank, reason in refused.items():
        if reason:
            _write(folder, rank, f"no stacks: {reason}\n")
    for rank in _answered(run_dir, refused, processes, deadline):
        _write(folder, rank, _answer(_file_of(run_dir, rank)))
    return folder


def of_ranks(run_dir: Path, processes: Processes, seconds: float) -> dict[int, str]:
    """The stacks of the main threads of ranks that go on, which write them themselves; '' for one that does not."""
    deadline = time.monotonic() + seconds
    refused = {rank: _ask(run_dir, rank, *process) for rank, process in processes.items()}
    found = dict.fromkeys(processes, "")
    for rank in _answered(run_dir, refused, processes, deadline):
        found[rank] = _main_thread(_answer(_file_of(run_dir, rank)))
    return found


def place(path: Path) -> str:
    """Where the main thread stands, of the stacks in a file of `dump`, for people; '' if it has none."""
    with suppress(OSError):
        lines = [line.strip() for line in _main_thread(path.read_text(errors="replace")).splitlines()]
        return lines[0] if lines else ""
    return ""


def _main_thread(text: str) -> str:
    """The frames of the main thread, the innermost first: of py-spy's, which names it, or of faulthandler, the last."""
    threads = re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.MULTILINE)[1:]
    named = [thread for thread in threads if '"MainThread"' in thread.split("\n", 1)[0]]
    main = (named or threads or ["\n"])[-1]
    return "\n".join(line for line in main.splitlines()[1:] if line.startswith(" "))


def _write(folder: Path, rank: int, text: str) -> None:
    """Keep what there is of a rank; without room for it, nothing."""
    with suppress(OSError), open(folder / f"rank{rank}.txt", "w", opener=private) as file:
        file.write(text)


def _prune(parent: Path) -> None:
    """Keep the folders of the last incarnations that have one."""
    with suppress(OSError):
        folders = sorted((each for each in parent.iterdir() if each.name.isdigit()), key=lambda each: int(each.name))
        for old in folders[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _by_py_spy(folder: Path, processes: Processes, deadline: float) -> set[int]:
    """The ranks whose stacks py-spy has written."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else "")
    if not tool:
        return set()
    done = set()
    with ExitStack() as files:
        running = {}
        for rank, (pid, began) in processes.items():
            path = folder / f"rank{rank}.txt"
            if not began or liveness.started(pid) != began:
                continue
            with suppress(OSError):
                out = files.enter_context(open(path, "wb", opener=private))
                running[rank] = subprocess.Popen(
                    [tool, "dump", "--pid", str(pid)], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL
                )
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in running.values():
            if process.poll() is None:
                process.kill()
        deadline = time.monotonic() + _KILLED_SECONDS
        for rank, process in running.items():
            with suppress(subprocess.TimeoutExpired):  # it reads what does not answer: the next process reaps it
                process.wait(max(0.0, deadline - time.monotonic()))
            with suppress(OSError):
                if process.returncode == 0 and (folder / f"rank{rank}.txt").stat().st_size:
                    done.add(rank)
    return done


def _ask(run_dir: Path, rank: int, pid: int, began: int) -> str:
    """Empty the file of a rank, and ask the rank for its stacks. Returns why it cannot be asked; '' if it was."""
    if not began or liveness.started(pid) != began:
        return f"process {pid} has ended"
    if liveness.is_stopped(pid, began):
        return f"process {pid} is stopped by a signal, or by a debugger; install py-spy for stacks of stopped processes"
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        if not int(caught, 16) >> (_SIGNAL - 1) & 1:
            return f"process {pid} does not write its stacks"
        os.close(os.open(_file_of(run_dir, rank), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW))
        liveness.signal_process(pid, began, _SIGNAL)
    except (OSError, StopIteration, ValueError) as error:
        return f"process {pid} cannot be asked: {error}"
    return ""


def _answered(run_dir: Path, refused: Mapping[int, str], processes: Processes, deadline: float) -> Iterator[int]:
    """The ranks that were not `refused` and whose files have grown and grow no longer, as they come; then the others.

    As they come: the ranks may be killed meanwhile, and those of the next incarnation empty the files.
    """
    waiting = [rank for rank, reason in refused.items() if not reason]
    seen, grown = dict.fromkeys(waiting, 0), dict.fromkeys(waiting, time.monotonic())
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank in list(waiting):
            pid, began = processes[rank]
            over = liveness.started(pid) != began
            with suppress(OSError):
                if (present := _file_of(run_dir, rank).stat().st_size) != seen[rank]:
                    seen[rank], grown[rank] = present, time.monotonic()
            if over or seen[rank] and time.monotonic() - grown[rank] >= _QUIET_SECONDS:
                waiting.remove(rank)
                yield rank
    yield from waiting


def _answer(path: Path) -> str:
    """What a rank has written to its file."""
    try:
        with open(path, "rb") as file:
            return file.read(_LIMIT).decode(errors="replace") or "no stacks: the process did not answer\n"
    except OSError as error:
        return f"no stacks: {error}\n"
