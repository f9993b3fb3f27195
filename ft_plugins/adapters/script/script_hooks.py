"""Follow a script without editing it: act when it imports a module, wrap a framework's functions, detect how it ended.

Imports: a callback runs once, right after the module's own code and before the importing statement returns, so that
`from module import name` binds what the callback set. An error in a callback fails the import. A module that is never
imported costs one dictionary lookup per import of another. The only state is the finder in `sys.meta_path`.

Wrapping: a name is replaced in the module or object that *uses* it, before any other name is bound to it. What is
called in its place receives the original, and then the arguments.

The end: checked at exit, when the interpreter no longer knows why it exits. The end is orderly if the outermost frame
returned (a frame keeps its last instruction), or if the script called `sys.exit` with status 0. The status of
`raise SystemExit(...)` is not visible. In doubt, the end is not orderly. Before the exit, as where a script cleans up,
it is not if an exception is under way.

In: module names, owners, a frame of the script. Out: modules as the callbacks left them; a function to call at exit.
"""

from __future__ import annotations

import dis
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, NoReturn

from ...errors import UnsupportedError
from ...patches.declared import around
from ...patches.versions import MEGATRON

Callback = Callable[[ModuleType], None]
Choose = Callable[[importlib.machinery.ModuleSpec], importlib.abc.Loader | None]


def on_import(name: str, callback: Callback) -> None:
    """Call `callback(module)` right after `name` has executed, or at once if it is already imported."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
    else:
        _finder().callbacks.setdefault(name, []).append(callback)


def load_below(package: str, choose: Choose) -> None:
    """Load each module of the top-level `package` with the loader that `choose(spec)` returns; None: with its own."""
    _finder().choosers[package] = choose


def _finder() -> PostImportFinder:
    """The one finder of this interpreter; the first call puts it in front of the others."""
    for finder in sys.meta_path:
        if isinstance(finder, PostImportFinder):
            return finder
    finder = PostImportFinder()
    sys.meta_path.insert(0, finder)
    return finder


class PostImportFinder(importlib.abc.MetaPathFinder):
    """Wraps the loaders that the finders after it return, for the registered names."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self.choosers: dict[str, Choose] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of `fullname` with the chosen loader, or one that calls back; None for a name not registered."""
        choose = self.choosers.get(fullname.partition(".")[0])
        if choose is None and fullname not in self.callbacks:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None and choose is not None:
                    spec.loader = choose(spec) or spec.loader
                if spec.loader is not None and fullname in self.callbacks:
                    spec.loader = _CallingLoader(spec.loader, self)
                return spec
        return None


class _CallingLoader(importlib.abc.Loader):
    """Runs the callbacks after the original loader, which it first puts back into the module."""

    def __init__(self, loader: Any, finder: PostImportFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for callback in self._finder.callbacks.get(module.__name__, []):  # [] if this spec was wrapped twice
            callback(module)
        self._finder.callbacks.pop(module.__name__, [])  # last, so that a second import after an error fails as well


REPLACED = "__ft_replaced__"
_IN_ORDER = (None, 0)  # what an orderly exit passes


def is_within(inner: Any, outer: Any) -> bool:
    """Whether `inner` is `outer`, or a function that `outer` wraps (`functools.wraps`)."""
    while outer is not inner and hasattr(outer, "__wrapped__"):
        outer = outer.__wrapped__
    return outer is inner


def wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """From now on a call of `owner.name` is `call(original, *arguments)`."""
    setattr(owner, name, around(call)(getattr(owner, name)))


def replace(owner: Any, name: str, call: Callable[..., Any], *, framework: str, tested: str) -> None:
    """The same, once. Raises UnsupportedError if this version has no such function."""
    original = getattr(owner, name, None)
    if getattr(original, REPLACED, False):
        return
    if not callable(original):
        place = getattr(owner, "__name__", type(owner).__name__)
        raise UnsupportedError(
            f"{place} ({getattr(owner, '__file__', None)}) has no function '{name}': this version of {framework} "
            f"cannot be followed; use {tested}"
        )
    wrap(owner, name, call)
    setattr(getattr(owner, name), REPLACED, True)


replace_in_deepspeed = functools.partial(replace, framework="DeepSpeed", tested="0.16.9, 0.18.9 or 0.19.8")
replace_in_megatron = functools.partial(replace, framework="Megatron-LM", tested=f"one of {', '.join(MEGATRON)}")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` within this context."""
    own = vars(owner).get(name, replaced)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is replaced:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def follow_end(frame: FrameType) -> Callable[[], bool]:
    """Returns a function that says, at exit, whether the script ended in order; `frame` is any frame of the script."""
    while frame.f_back is not None:
        frame = frame.f_back
    statuses: list[Any] = ["none"]
    original = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        statuses.append(status)
        original(status)

    sys.exit = exit

    def orderly() -> bool:
        returned = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
        uncaught = hasattr(sys, "last_type")
        return not uncaught and (returned or statuses[-1] in _IN_ORDER)

    return orderly


def is_failing() -> bool:
    """Whether an exception is being handled, here or in a caller, as amid the `finally` of a script that has failed;
    not an exit with status 0. At exit, whether one has ended the script."""
    error = sys.exc_info()[1]
    failing = error is not None and not (isinstance(error, SystemExit) and error.code in _IN_ORDER)
    return failing or hasattr(sys, "last_type")
