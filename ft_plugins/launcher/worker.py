"""Entry of each rank: `python -m ft_plugins.launcher.worker [-m] script args...`, started by ft-run.

Invariant: no rank outlives its ft-run, even if that is killed with SIGKILL. An error that no restart can cure is one
line and the status EXIT_REFUSED, never a traceback; any other error is the script's own and passes unchanged.

The script's `sys.argv` holds only its own arguments: ft-run has removed `--ftp-*` and `--reft*`, which the script need
not know. Adapters read the configuration from `launch_context().config`. Hooks and, on a machine without CUDA, device
patches are registered before the script runs and act when it imports the framework.

With the variable `preloader.VARIABLE` this process is none, but forks them. Nothing here imports torch before that is
known.

In: the environment of `config.launch_context`. Out: the script, run as `__main__`; `TORCHELASTIC_ERROR_FILE` for the
agent.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from ..base import faults, files, stamps
from ..config import LaunchContext, launch_context
from ..errors import EXIT_REFUSED, FtError, ProtocolError, ReplicaError
from ..smp.watch import liveness, stacks
from . import hooks
from .preload import preloader
from .preload.new_process import bind_to_agent

_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *liveness.NOTICES)  # by the agent
_EXIT_FAILED = 1  # a restart may cure it
_OBJECTS = 200_000  # new ones before a collection; imports of torch and a framework leave half a million

P = ParamSpec("P")
R = TypeVar("R")


def enter(context: LaunchContext) -> None:
    """Prepare a rank: bind it to its agent, arm the configured faults. Notices of preemption, which batch systems send
    to all processes, are ft-run's, unless the script handles them itself."""
    liveness.ignore_notices()
    if context.agent_pid is not None:
        bind_to_agent(context.agent_pid)
    if context.config is not None:
        faults.arm(context.config.faults, rank=context.rank, restart=context.restart)
    if context.run_dir is not None:
        with suppress(OSError):  # without room for the file it is not asked for stacks
            stacks.listen(context.run_dir, context.rank)
        stamps.follow_groups(importlib.import_module("torch.distributed"))
        stamps.afterwards(collect_seldom())


def collect_seldom() -> Callable[[], None]:
    """Let Python's cyclic garbage collector run seldom while a rank starts: it would find little, and takes a sixth of
    the processor time of a start. It is never off, so a script that never gets further is collected too.

    Returns a function that undoes it, unless the thresholds were changed meanwhile.
    """
    usual = gc.get_threshold()
    if not gc.isenabled() or not 0 < usual[0] < _OBJECTS:
        return lambda: None
    seldom = (_OBJECTS, *usual[1:])
    gc.set_threshold(*seldom)

    def undo() -> None:
        if gc.get_threshold() == seldom:
            gc.set_threshold(*usual)

    return undo


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, but an FtError ends the process with one line: status EXIT_REFUSED, or 1 if a restart may help."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except FtError as error:
            _end(error)

    return run


def forked(function: Callable[P, R], close_copies: Sequence[Callable[[], None]]) -> Callable[P, R]:
    """`function` as the entry of a rank that is forked from its agent.

    `close_copies` close the agent's descriptors.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        stamps.begin()
        for close in close_copies:
            close()
        for number in _HANDLED:  # the agent's handlers raise, which a rank's code might catch
            signal.signal(number, signal.SIG_DFL)
        enter(launch_context(os.environ))
        return guarded(function)(*args, **kwargs)

    return run


def _end(error: FtError) -> NoReturn:
    """Report the error and end at once, before destructors close sockets and peers fail too."""
    context = launch_context(os.environ)
    message = " ".join(str(error).split())
    named = re.match(r"rank \d+: ", message)
    line = f"ft_plugins: {message}" if named else f"ft_plugins: rank {context.rank}: {message}"
    code = _EXIT_FAILED if isinstance(error, (ReplicaError, ProtocolError)) else EXIT_REFUSED
    if not _report(line, code) or code == _EXIT_FAILED:
        print(line, file=sys.stderr)  # else the agent prints it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(line: str, code: int) -> bool:
    """Write torch elastic's error file atomically; False if no agent asked for one."""
    target = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not target:
        return False
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
    files.write_json(Path(target), {"message": {"message": line, "errorCode": code, "extraInfo": extra}})
    return True


def place_folder(script: str) -> None:
    """Put the script's folder first on the path, as `python script` does."""
    if not getattr(sys.flags, "safe_path", False):  # python -P, since 3.11
        sys.path[0] = str(Path(script).resolve().parent)


def run_script(script: str, arguments: Sequence[str], module: bool) -> None:
    """Run `script` as `__main__`, as `python [-m] script arguments` would, once its folder is placed."""
    sys.argv = [script, *arguments]
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def main(argv: Sequence[str] | None = None) -> None:
    """`[-m] script args...`. As a preloader this process returns from `serve` in each rank that it forks."""
    liveness.ignore_notices()  # before the imports, which take seconds
    words = list(sys.argv[1:] if argv is None else argv)
    module = words[:1] == ["-m"]
    script, *arguments = words[1:] if module else words
    preloaded = preloader.serve(words, place_folder) if preloader.VARIABLE in os.environ else None
    errors: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")

    def run() -> None:
        context = launch_context(os.environ)
        enter(context)
        registered = preloaded or hooks.register(context)
        registered.context = context
        if not module and preloaded is None:  # else it is placed, and modules may have put others before it
            place_folder(script)
        try:
            run_script(script, arguments, module)
        except SystemExit as stop:
            if stop.code:
                raise
            for end in registered.endings:  # in here, where it shows how the script ends
                end()
        for end in registered.endings:
            end()

    errors.record(guarded(run))()


if __name__ == "__main__":
    main()
