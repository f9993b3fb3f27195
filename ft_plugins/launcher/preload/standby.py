"""A standby worker: imports what a rank imports, waits, and becomes that rank when it is started again.

    python -m ft_plugins.launcher.preload.standby <socket> <run directory> <local rank> <pid of the agent> [-m] script
    args...

Invariant: after the hand-over everything is as in a new process that has reached the same statement of the script.
The imports run in the main thread, behind the hooks of a rank, in the script's own order: the beginning of the script
is executed, then what torch, Python and this package have imported later in the running rank. A standby has no CUDA
context, no connection and no port, ends with its agent, and before any rank when memory runs out. In doubt it refuses,
and a new process is started.

In: what the running rank has imported; from the agent: questions, then environment, output, arguments. Out: a rank.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ...base import stamps
from ...base.intake import read_bytes
from ...config import launch_context
from ...model import imported
from ..agent.ended_first import EndedFirst
from ..binding import bind_to_agent
from . import standby_plan, standby_script
from .import_guard import ImportGuard
from .noted_times import ImportTimes, NotedTime
from .standby_channel import StandbyChannel
from .standby_watch import EnvironmentWatch, connected

_SCRIPT_LIMIT = 16 << 20  # bytes
_STANDBY, _WORKER, _HOOKS = (f"ft_plugins.launcher.{name}" for name in ("preload.standby", "worker", "hooks"))
_OWN_WORDS = 4  # before those of the worker


class _Unusable(Exception):
    """This standby cannot become a rank."""


class _Again(str):
    """A place in sys.path, put there by a statement that the script will execute again."""


class _Standby:
    def __init__(self, words: list[str], run_dir: Path, local_rank: int) -> None:
        self._words = words
        self._module = words[:1] == ["-m"]
        self._script, *self._arguments = words[1:] if self._module else words
        self._began = time.time_ns()
        self._imported = imported.read(run_dir, local_rank)
        self._environment: dict[str, str] = {}
        self._read: set[str] = set()
        self._set: dict[str, str | None] = {}
        self._filters: list[Any] = []  # of warnings, by statements that the script will execute again
        self._files: dict[str, tuple[int, ...] | None] = {}
        self._endings: list[Callable[[], None]] = []
        self._cuda_is_initialized: Callable[[], bool] = lambda: False
        self._own_main, self._main = sys.modules["__main__"], ModuleType("__main__")
        self._times, self._noted = ImportTimes(), list[NotedTime]()

    def import_ahead(self) -> None:
        """Raises _Unusable, and whatever an import raises."""
        guard, watch, folder = ImportGuard(), EnvironmentWatch(), os.getcwd()
        self._environment = watch.before
        try:
            worker, hooks = (importlib.import_module(each) for each in (_WORKER, _HOOKS))
            stamps.follow_groups(importlib.import_module("torch.distributed"))  # before the script takes its functions
            self._cuda_is_initialized = importlib.import_module("torch.cuda").is_initialized  # before it is patched
            sys.argv = [self._script, *self._arguments]
            if not self._module:
                worker.place_folder(self._script)
            self._endings = hooks.register(launch_context(os.environ))
            self._begin_script()
            self._read = watch.read()
            for name in standby_plan.later_names(self._imported, sys.modules):
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError as error:
                    if error.name != name:
                        raise
            later = watch.read()
        except BaseException:
            if guard.stopped:
                raise _Unusable(guard.stopped) from None
            raise
        finally:
            guard.on = False
            seen = dict(os.environ)
            self._set = watch.end()
        self._files = {path: _state(path) for path in self._paths() | guard.files()}
        self._noted = self._times.found(list(sys.modules.values()))
        conflict = watch.conflict()
        refusals = (
            guard.stopped,
            f"modules set what the script itself uses before: {conflict}" if conflict else "",
            standby_plan.filters_refusal(warnings.filters, self._filters),
            "an import changes the working folder" if os.getcwd() != folder else "",
            standby_plan.later_refusal(self._imported, seen, later),
            standby_plan.modules_refusal(self._imported, imported.versions(), imported.module_names()),
            "an import holds a connection or a port" if connected() else "",
            self.refusal(),
        )
        self._read |= later
        for refusal in filter(None, refusals):
            raise _Unusable(refusal)

    def _begin_script(self) -> None:
        """Execute the beginning of the script, in a module that stands for `__main__`."""
        main = self._main
        if self._module:
            spec = importlib.util.find_spec(self._script)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self._script}.__main__")
            source = getattr(spec and spec.loader, "get_source", lambda _: None)(spec and spec.name)
            if spec is None or source is None or spec.origin is None:
                raise _Unusable(f"the source of module {self._script} was not found")
            main.__package__, path = spec.parent, spec.origin
            sys.argv[0] = path
        else:
            path = self._script
            source = importlib.util.decode_source(read_bytes(Path(path), _SCRIPT_LIMIT))
            main.__package__ = ""
        main.__file__ = path
        sys.modules["__main__"] = main
        self._files[os.path.abspath(path)] = None
        for statement in standby_script.beginning(source, path):
            places, filters = list(sys.path), list(warnings.filters)
            code = compile(ast.Module([statement], []), path, "exec", dont_inherit=True)
            exec(code, vars(main))
            text = ast.unparse(statement)
            if "sys.path" in text:
                for index in standby_plan.added(places, sys.path):
                    sys.path[index] = _Again(sys.path[index])
            if "warnings." in text:
                self._filters += standby_plan.put_in_front(filters, warnings.filters)

    def _paths(self) -> set[str]:
        """The files of all modules, and of the script."""
        modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        found = {vars(module).get("__file__") for module in modules}
        return {os.path.abspath(path) for path in found if isinstance(path, str)} | self._files.keys()

    def refusal(self) -> str:
        """Why this standby cannot be used any more; '' if it can."""
        if self._cuda_is_initialized():
            return "an import has created a CUDA context"
        for path, before in self._files.items():
            now = _state(path)
            if now != before or now is not None and now[0] > self._began:
                return f"{path} has changed since it was imported"
        return ""

    def environment_refusal(self, environment: dict[str, str]) -> str:
        """Why it cannot be used with that environment; '' if it can."""
        return standby_plan.environment_refusal(self._environment, environment, self._read)

    def become(self, environment: dict[str, str], outputs: list[int]) -> None:
        """Run the script as the rank of that environment, with these descriptors for standard output and error."""
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, output in enumerate(outputs, start=1):
            os.dup2(output, descriptor)
            os.close(output)
        whole: dict[str, str | None] = dict.fromkeys(os.environ) | environment | self._set
        for name, value in whole.items():  # only what differs: a thread may read the others
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:
                os.environ[name] = value
        sys.path[:] = [place for place in sys.path if not isinstance(place, _Again)]
        waited = self._times.waited()
        for noted in self._noted:
            noted.move(waited)
        own = sys.orig_argv.index(_STANDBY)
        sys.orig_argv[own : own + 1 + _OWN_WORDS] = [_WORKER]
        sys.modules["__main__"] = self._own_main
        _run_in(self._main)
        sys.modules[_WORKER].main(self._words, self._endings)


def _run_in(main: ModuleType) -> None:
    """Have runpy run the script in `main`, which modules may have taken from `sys.modules` when they were imported."""
    runpy: Any = importlib.import_module("runpy")
    usual = getattr(runpy, "_TempModule", None)
    if usual is None:  # another Python: the script runs in a module of its own
        return

    def taken(name: str) -> Any:
        runpy._TempModule = usual
        temporary = usual(name)
        vars(main).clear()
        vars(main).update(vars(temporary.module))
        temporary.module = main
        return temporary

    runpy._TempModule = taken


def _state(path: str) -> tuple[int, ...] | None:
    """What changes when a file does, first the time of the last change; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


def main() -> None:
    """Import, then answer the agent until it hands over, or ends."""
    end, run_dir, local_rank, agent, *words = sys.argv[1:]
    channel = StandbyChannel(socket.socket(fileno=int(end)))
    bind_to_agent(int(agent))
    channel.send({"bound": True})
    first = EndedFirst()
    began = time.monotonic()
    try:
        standby = _Standby(words, Path(run_dir), int(local_rank))
        standby.import_ahead()
    except BaseException as error:
        words_of = str(error) if isinstance(error, _Unusable) else f"{type(error).__name__}: {error}"
        channel.send({"refusal": words_of[:2000]})
        os._exit(0)
    channel.send({"ready": round(time.monotonic() - began, 3), "modules": len(sys.modules)})
    taken, outputs = _handed_over(standby, channel, first)
    stamps.begin()
    channel.close()
    standby.become(taken, outputs)


def _handed_over(standby: _Standby, channel: StandbyChannel, first: EndedFirst) -> tuple[dict[str, str], list[int]]:
    """Answer until the agent hands over; the environment and the output that it gives."""
    while True:
        try:
            message: dict[str, Any]
            message, outputs = channel.receive()
            environment = message.get("environment")
            if environment is None:
                refusal = standby.refusal()
            else:
                refusal = standby.environment_refusal(environment) or first.undo()
            channel.send({"refusal": refusal})
        except (EOFError, OSError, ValueError):
            os._exit(0)
        if environment is not None and not refusal:
            return environment, outputs
        if refusal:
            os._exit(0)


if __name__ == "__main__":
    main()
