"""What an import has done to this process that its ranks would share, or that each rank has to make for itself.

    generators   seeded or drawn from: a rank has its own, which a module of it may have seeded
    temporary    files with names chosen at random: the first rank that ends removes what the others use
    timers       of signals: a forked process has none
    shared       memory without a name, such as that of a lock of `multiprocessing`: ranks would wait for each other

A rank has variables of the environment, filters of warnings and functions that are called at exit from its own import
of a module on, and none of a module that it does not import. So what an import ahead changes of them is undone and *put
off* until the rank imports one of the modules that came with it. An import statement that finds a module in
`sys.modules` reads `_initializing` of its spec, and so do `import_module` from Python 3.11 on and `FirstImport` of
`launcher.hooks` for the package of a module that is not there: that shows it.

Which variables of the environment modules read and set meanwhile is noted by name; copying the whole environment reads
none. Python code that uses `os.environ` or `os.getenv` is seen, what libraries in C read is not.

In: this process. Out: what differs between two readings, in words.
"""

from __future__ import annotations

import atexit
import os
import pickle
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

from ...model import imported

_HARMLESS = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_UNNAMED = " (deleted)"  # how the kernel shows it


@dataclass(frozen=True)
class Traces:
    """One reading; generators by module, for those that are imported."""

    generators: dict[str, Any]
    temporary: Any
    timers: tuple[bool, ...]
    shared: Counter[str]

    def reason(self, before: Traces) -> str:
        """What an import since `before` has done; '' for nothing."""
        if any(self.generators[name] != state for name, state in before.generators.items()):
            return "it uses a random generator when it is imported"
        if self.temporary != before.temporary:
            return "it makes temporary files when it is imported"
        if self.timers != before.timers:
            return "it sets a timer when it is imported"
        if self.shared - before.shared:
            return "it makes memory that forked processes share"
        return ""


def read() -> Traces:
    """Those of this process."""
    names = vars(tempfile).get("_name_sequence")  # of all temporary files; None before the first
    return Traces(_generators(), names and names.rng.getstate(), _timers(), _shared())


def threads(after_fork: bool = False) -> int:
    """Threads of this process. Some libraries, such as OpenBLAS, end theirs before it forks, so that shows more."""
    if after_fork and threads() > 1:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task"))


def descriptors(*known: int) -> set[str]:
    """What the open descriptors lead to, `known` and harmless ones apart; NVML, which torch leaves open, is ended."""
    for _ in range(2):
        found = set()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of the folder itself is closed by now
                target = os.readlink(link)
                if int(link.name) not in known and target not in _HARMLESS and not target.endswith("/fd"):
                    found.add(target)
        if not any(each.startswith("/dev/nvidia") for each in found):
            break
        with suppress(OSError, AttributeError):
            nvml = CDLL("libnvidia-ml.so.1")
            while nvml.nvmlShutdown() == 0:  # counts its users
                pass
    return found


def _generators() -> dict[str, Any]:
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = pickle.dumps(numpy_random.get_state())
    if (generator := getattr(sys.modules.get("torch"), "default_generator", None)) is not None:
        found["torch"] = generator.get_state().tolist()
    return found


def _timers() -> tuple[bool, ...]:
    kinds = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return tuple(signal.getitimer(kind)[0] > 0 for kind in kinds)


def _shared() -> Counter[str]:
    """Writable shared mappings of memory that no other process can open by name."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    mapped = (line.split(None, 5) for line in lines if line.endswith(_UNNAMED))
    return Counter(name for _, rights, _, _, _, name in mapped if rights[1] == "w" and rights[3] == "s")


# ---- variables of the environment ----


class EnvironmentReads:
    """Notes within `watching`. `before`: the environment when this was constructed."""

    def __init__(self) -> None:
        self.before = dict(os.environ)
        self._names: set[bytes] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is used meanwhile."""
        noting = _NotingDict(cast(Any, os.environ)._data, self._names)
        _use(noting)
        try:
            yield
        finally:
            _use(dict(noting.items()))

    @property
    def used(self) -> set[str]:
        """The names that were read, set or removed so far."""
        return {os.fsdecode(name) for name in self._names}

    def written(self) -> dict[str, str | None]:
        """What modules have set; None: removed."""
        names = self.before.keys() | os.environ.keys()
        return {name: os.environ.get(name) for name in names if self.before.get(name) != os.environ.get(name)}


class _NotingDict(dict[bytes, bytes]):
    def __init__(self, content: dict[bytes, bytes], names: set[bytes]) -> None:
        super().__init__(content)
        self._names = names
        self._copied: list[bytes] = []  # names that an iteration reads next, the first one last

    def __iter__(self) -> Iterator[bytes]:
        names = list(super().__iter__())
        self._copied = names[::-1]
        return iter(names)

    def __getitem__(self, name: bytes) -> bytes:
        if self._copied and self._copied[-1] == name:
            self._copied.pop()
        else:
            self._copied.clear()
            self._names.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._names.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: bytes) -> None:
        self._names.add(name)
        super().__delitem__(name)


def _use(content: dict[bytes, bytes]) -> None:
    for environ in (os.environ, os.environb):
        cast(Any, environ)._data = content


# ---- what a rank's own import does ----


class WaitingSpec(ModuleSpec):
    """Of a module that has been imported ahead. An import of it reads `_initializing`; `happen` is a function that does
    what importing it ahead has changed, and ends the wait."""

    _initializing = property(lambda self: self.happen())


@contextmanager
def put_off() -> Iterator[None]:
    """An import ahead. What it changes of the environment, the filters of warnings and the functions that are called at
    exit is undone, and happens when the rank imports one of its modules. What it uses of an earlier one that waits
    happens too, and then waits with it."""
    known = {
        name for name, each in list(sys.modules.items()) if not isinstance(getattr(each, "__spec__", None), WaitingSpec)
    }
    environment, filters, at_exit = dict(os.environ), list(warnings.filters), cast(Any, atexit.register)
    calls: list[Callable[[], object]] = []

    def register(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__module__", None) not in sys.modules.keys() - known:
            return at_exit(function, *args, **kwargs)  # a module that is there may note that this was done
        calls.append(lambda: atexit.register(function, *args, **kwargs))
        return function

    atexit.register = register
    try:
        yield
    finally:
        atexit.register = at_exit
    new = {
        name: spec
        for name, each in list(sys.modules.items())
        if name not in known and type(spec := getattr(each, "__spec__", None)) is ModuleSpec
    }
    changed = {name: value for name, value in os.environ.items() if environment.get(name) != value}
    added = [each for each in warnings.filters if each not in filters]
    if not new or not (changed or added or calls):
        return

    def happen() -> None:
        for spec in new.values():
            spec.__class__ = ModuleSpec
        kept = {name: value for name, value in changed.items() if os.environ.get(name) == environment.get(name)}
        os.environ.update(kept)  # the script has set the others
        imported.found_by_modules(kept)
        cast(Any, warnings).filters[:] = [*added, *(each for each in warnings.filters if each not in added)]
        cast(Any, warnings)._filters_mutated()
        while calls:
            calls.pop(0)()

    for name in changed:
        del os.environ[name]
    os.environ.update({name: environment[name] for name in changed if name in environment})
    cast(Any, warnings).filters[:] = filters
    for name, spec in new.items():
        package, _, own = name.rpartition(".")
        if package in known and (names := vars(sys.modules[package])).get(own) is sys.modules[name]:
            calls.append(partial(names.__setitem__, own, names.pop(own)))
        vars(spec)["happen"], spec.__class__ = happen, WaitingSpec
