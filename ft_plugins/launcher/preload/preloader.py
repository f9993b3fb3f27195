"""The preloader of a node: a process that imports what the ranks import, then forks them, single-threaded.

Its command is that of a rank, `python -u -m ft_plugins.launcher.worker [-m] script args...`, so that a forked rank has
the command of one; the variable VARIABLE, which ft-run sets, makes it a preloader.

Invariant: nothing of the script is executed here. Only a process with one thread, without a descriptor that a module
left open (a socket, a GPU) and whose modules' files have not changed is forked. A package that breaks this, or that
reads what only a rank knows, is *left* to the ranks: the agent starts another process without it. What the agent cannot
get from it, it gets by starting a new process.

    agent      fork: environment, folder; descriptors of output, error and a pipe      again: the record is new
    preloader  ready: seconds; left: packages with reasons; pid of a rank; refused: why; restart: packages to leave

A rank is forked twice, so that it becomes a child of the agent (see `parent`), and goes on once it can read from the
pipe: the agent then knows it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import os
import socket
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pydantic import TypeAdapter

from ...base import files, stamps
from ...base.installed import is_installed
from ...base.intake import read_bytes
from ...config import launch_context
from ...events import say
from ...model import imported
from .. import hooks
from . import new_process, packets, traces, what_to_import
from .new_process import bind_to_agent
from .traces import EnvironmentReads
from .what_to_import import BASE, ImportStatement

VARIABLE = "FTP_PRELOAD_ORDER"  # not the name of a flag, which people may set
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # makes torch count GPUs without creating a context, which no fork survives
_NAME = "ft-preload"
_SCRIPT_BYTES = 16 << 20
_OUTPUT_BYTES = 1 << 20  # of what imports print
_NEVER = (1 << 31) - 1  # new objects before a collection
_STARTS = 8  # of this process, each without more packages


@dataclass(frozen=True)
class Order:
    """What the agent wants, in VARIABLE as JSON. `end`: the descriptor of this process's end of the pair."""

    end: int
    agent: int
    ranks: int  # of this node
    record: str  # a file of `imported`, which may not exist
    config: str  # FTP_CONFIG
    left: dict[str, str] = field(default_factory=dict)  # packages that are left to the ranks, with reasons
    starts: int = 0


class _Refused(Exception):
    """Ranks cannot be forked from this process, nor from another one without a package."""


def serve(words: list[str], place_folder: Any) -> hooks.FrameworkHooks:
    """Import, and answer the agent. Returns in each rank, with the hooks that its script has already met."""
    order = TypeAdapter(Order).validate_json(os.environ.pop(VARIABLE))
    bind_to_agent(order.agent)
    end = socket.socket(fileno=order.end)
    end.set_inheritable(False)
    name = new_process.name_process(_NAME)
    for descriptor in (1, 2):  # files, which hold what an earlier start printed
        os.ftruncate(descriptor, 0)
    try:
        preloader = _Preloader(order, end, words, name)
        if words[:1] != ["-m"]:
            place_folder(words[0])
        preloader.import_all()
        while True:
            message, descriptors = packets.receive(end)
            if "fork" not in message:
                preloader.import_all()
            elif preloader.answer(message["fork"], descriptors):
                break
    except (EOFError, ConnectionError):  # the agent has ended, or will end this process
        os._exit(0)
    except Exception as error:
        known = isinstance(error, _Refused)
        refused = str(error) if known else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            packets.send(end, {"refused": refused[:2000], "for_good": known})
        os._exit(1)  # not 0: it may be a rank by now
    try:
        preloader.take_over(message["fork"], descriptors)
    except Exception as error:
        say(f"a forked rank imports by itself: {type(error).__name__}: {error}", alarm=True)
        os.chdir(message["fork"]["folder"])
        os.execve(sys.executable, sys.orig_argv, message["fork"]["environment"])
    return preloader.hooks


class _Preloader:
    def __init__(self, order: Order, end: socket.socket, words: list[str], name: str) -> None:
        self._order, self._end, self._name = order, end, name
        self._environment = dict(os.environ)
        self._module = words[:1] == ["-m"]
        self._script, *self._arguments = words[1:] if self._module else words
        self._began, self._left = time.time_ns(), dict(order.left)
        self._monotonic = time.monotonic()
        self._clocks, self._descriptors = new_process.Clocks(), traces.descriptors()
        self._folder = os.getcwd()
        config = launch_context({"FTP_CONFIG": order.config})
        self.hooks = hooks.register(replace(config, local_world_size=order.ranks))  # rank 0 passes on what they say
        self._reads = EnvironmentReads()
        self._noted: list[new_process.Noted] = []
        self._traces = traces.read()
        self._before: list[str] = []  # folders that the script puts first on the path
        self._files: dict[str, tuple[int, ...] | None] = {}

    # ---- import ----

    def import_all(self) -> None:
        """Import what is not yet imported, and report that ranks can be forked. Has another process start without
        packages that must be left to the ranks. Raises _Refused."""
        collected = gc.get_threshold()
        gc.set_threshold(_NEVER, *collected[1:])  # not `disable`, which a module may do for the rank
        record, (source, file) = imported.read_record(Path(self._order.record)), self._source()
        found = dict(self._left)
        variables = set(record.variables)
        named: list[ImportStatement] = []
        self._before = []
        with suppress(SyntaxError, ValueError):  # the rank says so
            for text in what_to_import.texts(source, self._adjacent):
                variables |= what_to_import.variables_set(text)
                self._read_path(text, file)
            named = what_to_import.statements(source, self._adjacent)
        variables.discard(NVML)  # set here, too, and by accelerate for a moment
        if unfit := what_to_import.read_when_loaded(variables):
            raise _Refused(f"the script sets {', '.join(unfit)}, which libraries read when they are loaded")
        if not self._installed("torch"):
            raise _Refused("torch is not in a folder of installed packages")
        sys.argv = [self._script, *self._arguments]
        for statement in what_to_import.in_order(named, record.names, found, self._installed):
            known = not statement.names and statement.module in sys.modules
            if not known and (reason := self._import(statement, variables)):
                found.setdefault(statement.unit, reason.encode(errors="backslashreplace").decode())  # paths
        if found != self._left:
            self._start_again(found)
        self._files = {path: _state(path) for path in _paths()}
        self._noted = self._clocks.noted()
        if gc.get_threshold()[0] == _NEVER:
            gc.set_threshold(*collected)
        gc.freeze()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        size, seconds = pages * os.sysconf("SC_PAGE_SIZE"), round(time.monotonic() - self._monotonic, 3)
        packets.send(self._end, {"ready": seconds, "modules": len(sys.modules), "bytes": size})

    def _import(self, statement: ImportStatement, variables: set[str]) -> str:
        """Import it; why its package must be left to the ranks, '' if it need not."""
        known, used, before = set(sys.modules), self._reads.used, self._traces
        threads, descriptors = traces.threads(), traces.descriptors()
        at_once = statement.module in BASE or sys.version_info < (3, 11)  # each rank imports it before its script
        try:
            with self._reads.watching(), nullcontext() if at_once else traces.put_off():
                module = importlib.import_module(statement.module)
                for name in statement.names:
                    if not hasattr(module, name):
                        importlib.import_module(f"{statement.module}.{name}")
            if statement.module == "torch.distributed":
                stamps.follow_groups(module)  # before the script takes its functions
            if statement.module == "torch" and "numpy" in sys.modules:
                importlib.import_module("numpy.random")  # so that its state before each import is known
        except ImportError:
            pass  # the script tries, and does without it
        except (Exception, SystemExit) as error:
            return f"its import fails: {type(error).__name__}: {error}"[:500]
        if traces.threads() > threads and traces.threads(after_fork=True) > threads:
            return "it leaves a thread running"
        if kept := traces.descriptors() - descriptors:
            return f"it keeps {', '.join(sorted(kept))} open"
        used = {name for name in self._reads.used - used if name in variables or what_to_import.withheld(name)}
        if used:
            return f"it uses {', '.join(sorted(used))} of the environment when it is imported"
        self._traces = traces.read()
        if reason := self._traces.reason(before):
            return reason
        if os.getcwd() != self._folder:
            os.chdir(self._folder)
            return "it changes the working folder"
        for name in sys.modules.keys() - known:
            path = getattr(sys.modules[name], "__file__", None)
            if isinstance(path, str) and os.path.isabs(path) and not is_installed(path):
                return f"it imports {path}, which is not installed"
            if "." not in name and self._is_before(name):
                return f"it imports {name}, which the script finds in a folder of its own"
        return ""

    def _start_again(self, left: dict[str, str]) -> NoReturn:
        """Report the packages in `left`, and begin again without them."""
        packets.send(self._end, {"left": left})
        if "torch" in left or self._order.starts + 1 >= _STARTS:
            raise _Refused(f"{(last := list(left)[-1])} cannot be imported ahead: {left[last]}")
        self._restart(left)

    def _restart(self, left: dict[str, str]) -> NoReturn:
        """Have the agent start another one: `exec` would keep priority, timers and what libraries in C left open."""
        packets.send(self._end, {"restart": left, "starts": self._order.starts + 1})
        os._exit(0)

    def _read_path(self, text: str, file: str) -> None:
        """Note the folders that a text puts before those of installed packages. Raises SyntaxError, _Refused."""
        try:
            self._before += what_to_import.first_on_path(text, file)
        except SyntaxError:
            raise
        except ValueError as error:
            raise _Refused(f"the script changes sys.path, reading does not show how: {error}") from error

    def _source(self) -> tuple[str, str]:
        """The text of the script and its path; '' if it is not found."""
        if not self._module:
            return _text(Path(self._script)), self._script
        parts = self._script.split(".")
        for place in sys.path:
            for path in (Path(place, *parts).with_suffix(".py"), Path(place, *parts, "__main__.py")):
                if path.is_file():
                    return _text(path), str(path)
        return "", ""

    def _adjacent(self, package: str) -> str | None:
        """The text of a module next to the script."""
        folder = Path(sys.path[0] or ".")
        paths = (folder / package / "__init__.py", folder / f"{package}.py")
        return next((_text(path) for path in paths if path.is_file()), None)

    def _installed(self, package: str) -> bool:
        if package in sys.builtin_module_names:
            return True
        if self._is_before(package):
            return False
        spec = importlib.machinery.PathFinder.find_spec(package)
        places = [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            return package in sys.stdlib_module_names
        return all(is_installed(place) for place in places)  # not one of the script that has the name of Python's

    def _is_before(self, package: str) -> bool:
        """Whether the script finds it in a folder that it puts first on the path."""
        if not self._before or (spec := importlib.machinery.PathFinder.find_spec(package, self._before)) is None:
            return False
        whole = importlib.machinery.PathFinder.find_spec(package, [*self._before, *sys.path])
        return spec.origin is not None or whole is None or whole.origin is None  # a folder without code comes last

    # ---- fork ----

    def answer(self, request: dict[str, Any], descriptors: list[int]) -> bool:
        """Fork a rank, or say why not; whether this process is the rank."""
        environment: dict[str, str] = request["environment"]
        if changed := next((path for path, state in self._files.items() if self._has_changed(path, state)), ""):
            packets.send(self._end, {"refused": f"{changed} has changed since it was imported", "again": True})
            self._restart(self._left)
        names = self._environment.keys() | environment.keys()
        differs = {name for name in names if self._environment.get(name) != environment.get(name)}
        if wrong := sorted((differs - {NVML}) & self._reads.used):
            packets.send(self._end, {"refused": f"the environment differs: {', '.join(wrong)}"})
        elif (threads := traces.threads(after_fork=True)) > 1 or traces.descriptors(*descriptors) - self._descriptors:
            packets.send(self._end, {"refused": f"it has {threads} threads, or keeps a descriptor open"})
        elif (pid := self._fork(descriptors[2])) is None:
            return True
        else:
            packets.send(self._end, {"pid": pid})
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def _has_changed(self, path: str, state: tuple[int, ...] | None) -> bool:
        now = _state(path)
        return now != state or now is not None and now[0] > self._began

    def _fork(self, may_run: int) -> int | None:
        """The pid of a rank, which is the agent's child by now; None in the rank, once it may run."""
        sys.stdout.flush()
        sys.stderr.flush()
        told, tell = os.pipe()
        middle = os.fork()
        if middle:
            os.close(tell)
            pid = os.read(told, 32)
            os.close(told)
            os.waitpid(middle, 0)  # then the kernel has given its child to the agent
            return int(pid)
        if os.fork():
            os._exit(0)
        self._end.close()  # so that the agent sees the end of its preloader
        os.setsid()
        os.write(tell, str(os.getpid()).encode())
        for descriptor in (told, tell):
            os.close(descriptor)
        if os.read(may_run, 1) != b"1" or os.getppid() != self._order.agent:
            os._exit(1)  # the agent has started another one, or has ended
        os.close(may_run)
        return None

    def take_over(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """In a rank: become a new process, as the agent requests. An error lets it be one."""
        environment: dict[str, str] = request["environment"]
        printed = [os.pread(descriptor, _OUTPUT_BYTES, 0) for descriptor in (1, 2)]
        for descriptor, output in enumerate(descriptors[:2], start=1):
            os.dup2(output, descriptor)
            os.close(output)
        new_process.become(environment, self._reads.written(), request["folder"], self._name)
        for each in self._noted:
            each.renew(time.monotonic() - self._monotonic)
        if environment.get("RANK") == "0":  # as one that imports by itself
            for descriptor, text in enumerate(printed, start=1):
                files.write_all(descriptor, text)
        found = {name: self._environment.get(name) for name in self._reads.used - {NVML}}
        imported.found_by_modules(found | self._reads.written())


def _paths() -> set[str]:
    """The files of all modules."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return {path for module in modules if isinstance(path := vars(module).get("__file__"), str) and os.path.isabs(path)}


def _state(path: str) -> tuple[int, ...] | None:
    """What changes when a file does, first the time of the last change; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ctime_ns, status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


def _text(path: Path) -> str:
    try:
        return importlib.util.decode_source(read_bytes(path, _SCRIPT_BYTES))
    except (OSError, ValueError):
        return ""
