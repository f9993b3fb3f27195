"""Walk over the values that training keeps and a host does not capture: one bounded tree of texts by path.

    roots     modules, and what belongs to them; the variables of the script's functions that run, their globals, and
              those of the script's other modules that these import, or import something of
    followed  containers, objects with their slots and the plain values of their classes, modules in them, hooks,
              functions with what they keep (closures, attributes, defaults), bound arguments, generators that are
              suspended, with what their loops go over
    leaves    what `value_text` reads; lengths of containers; of a pass over a loader the number of batches

Left out: what other packages keep (frameworks, loggers, observers of a run, Python's own objects), functions that keep
nothing, tensors that are captured, and what the script has named to `ignore`.

Paths are written as a script would: `main.meters['train'].count` is a variable of the function `main`, `seen` a global
of the script's main module, `model.layer.memory[0]` what a module keeps. A `#` is a length: of a container, or how many
batches were taken of a pass over a loader. `.hooks` are the names of hooks, without those of libraries.

Invariant: nothing of the script is called, no source is read, and no error of reading gets out. Bounded: 6 levels, 64
elements of a container, 64 modules of the script, 4,096 values of the script and 16,384 of modules, the nearest first;
one object is reached by at most 3 paths, so that objects which refer to each other do not use up the room.

In: roots. Out: texts by path.
"""

from __future__ import annotations

import argparse
import functools
import gc
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn.modules import module as torchs_modules
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..base.installed import is_installed
from .data.data_parts import cells
from .script.script_names import stack, variables_of
from .value_text import (
    CONTAINERS,
    FUNCTIONS,
    PLAIN,
    Text,
    attributes,
    container_of,
    is_a,
    name_of,
    short,
    slots,
    text_of,
)

Root = tuple[str, Any]
_EACH = 256  # version points
_DEPTH, _ELEMENTS, _WAYS = 6, 64, 3  # levels; elements of a container; paths to one object
_SPACES = 64  # modules
_MOST_OF_SCRIPT, MOST_OF_MODULES = 4096, 16384  # values
# packages whose objects are known, or keep what belongs to the run and is no part of training
_CLOSED = {
    *("accelerate", "apex", "datasets", "deepspeed", "ft_plugins", "lightning", "megatron", "numpy", "peft", "pytest"),
    *("torch", "transformer_engine", "transformers", "_pytest"),
    *("comet_ml", "loguru", "mlflow", "pyarrow", "rich", "structlog", "tensorboard", "tensorboardX", "tqdm", "triton"),
    "wandb",
}
_OPEN = (LRScheduler, DataLoader, Dataset, Sampler, torch.amp.GradScaler, SimpleNamespace, argparse.Namespace)
_OPEN_NAMES = (  # states of communication hooks, what holds callbacks
    "torch.distributed.algorithms.", "transformers.trainer.Trainer", "transformers.trainer_callback.CallbackHandler",
)  # fmt: skip
_RUNNING = ("accelerate", "lightning", "megatron", "transformers")  # whose functions keep nothing of the script
# packages of modules that count for themselves, and whose state is known
_KNOWN_MODULES = ("deepspeed.", "megatron.", "torch.nn.parallel.", "transformer_engine.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_LEFT_OUT = frozenset((*vars(torch.nn.Module()), "state_dict", "load_state_dict"))
_PYTHONS = ("builtins", "itertools")
_PARTS = re.compile(r"[.#\[\]]+")


def is_examined(points: int) -> bool:
    """Whether everything is looked at, to see what training changes, at the version point that is the `points`-th of a
    process, from 1: at the 1st, 2nd, 4th, ... 256th, and from then on at each 256th."""
    return not points % _EACH or not points & (points - 1)


def walk(
    roots: Iterable[Root], left_out: Callable[[Any], bool], within: Collection[str] | None = None,
    devices: bool = True, most: int = _MOST_OF_SCRIPT,
) -> dict[str, Text]:  # fmt: skip
    """The text of each value that has one, by path; where two roots have one name, of the first. `left_out` is asked
    about each object and tensor, and returns True for what is not looked at. `within`: no other paths than these, which
    have to include all paths on the way to them (`prefixes`); None: all. `devices`: whether tensors on devices are
    read, for which the caller then waits. `most`: values, in all. Does not raise."""
    found: dict[str, Text] = {}
    pending = deque((path, value, _DEPTH) for path, value in roots if within is None or path in within)
    ways, kept = Counter[int](), list[Any]()  # an object that is kept alive keeps its id
    while pending and len(kept) < most:
        path, value, depth = pending.popleft()
        kept.append(value)
        text: Text | None = None
        with suppress(Exception):  # classes of the script may do as they like
            if type(value) not in PLAIN and left_out(value):
                continue
            if (text := text_of(value, devices)) is not None:
                found.setdefault(path, text)
        whole = text is not None and not is_a(value, FunctionType, MethodType, functools.partial, type, *CONTAINERS)
        if whole or is_a(value, torch.Tensor, ModuleType) or not depth or ways[id(value)] >= _WAYS:
            continue
        ways[id(value)] += 1
        with suppress(Exception):
            for label, part in _parts_of(value):
                if within is None or path + label in within:
                    pending.append((path + label, part, depth - (not is_a(part, torch.nn.Module))))
    return found


def prefixes(paths: Iterable[str]) -> set[str]:
    """The paths, and those of everything on the way to them, as `walk` makes them: of `a.b[0].c` also `a`, `a.b` and
    `a.b[0]`."""
    return {path[: one.start()] for path in paths for one in _PARTS.finditer(path)} | {*paths} | {
        path[: one.end()] for path in paths for one in re.finditer(r"\]", path)
    }


def names_in(path: str) -> set[str]:
    """The variables, attributes and keys on a path."""
    return {part.strip("'\"") for part in _PARTS.split(path)}


def script_roots(within: Collection[str] | None = None) -> Iterator[Root]:
    """The variables of the script's functions that run in the main thread, the innermost first, their globals, and
    those of its other modules. `within`: as in `walk`."""
    spaces: dict[int, Mapping[str, Any]] = {}
    for frame, variables in stack():
        module = str(frame.f_globals.get("__name__"))
        if is_installed(frame.f_code.co_filename) or module.partition(".")[0] in _RUNNING:
            continue  # it only calls the script, as a test runner or a command line library does
        if frame.f_code.co_name != "<module>":
            yield from _variables(f"{frame.f_code.co_name}.", variables, within)
        spaces[id(frame.f_globals)] = frame.f_globals
    pending = list(spaces.values())
    for space in pending:
        module = str(space.get("__name__"))
        yield from _variables("" if module == "__main__" else f"{module.rpartition('.')[2]}.", space, within)
        for one in list(space.values()) if len(pending) < _SPACES else ():
            of = one.__name__ if is_a(one, ModuleType) else one.__module__ if is_a(one, FunctionType, type) else ""
            if (other := _globals_of(str(of))) and id(other) not in spaces:
                pending.append(spaces.setdefault(id(other), other))


@cache
def _globals_of(module: str) -> Any:
    """The variables of a module, if it is one of the script's; else nothing."""
    file = getattr(sys.modules.get(module), "__file__", None)
    others = file is None or is_installed(file) or _is_closed(module) or module.partition(".")[0] in _RUNNING
    return {} if others else vars(sys.modules[module])


def _variables(prefix: str, variables: Mapping[str, Any], within: Collection[str] | None) -> Iterator[Root]:
    for name, value in list(variables.items()):
        wanted = not name.startswith("__") and (within is None or prefix + name in within)
        if wanted and (not is_a(value, FunctionType, type, ModuleType) or any(_kept_by(value))):
            yield prefix + name, value


def module_roots(name: str, module: torch.nn.Module, optimizers: Iterable[Any] = ()) -> Iterator[Root]:
    """The roots of a host's model under `name`: the module itself, with the modules in it; the hooks that torch calls
    for every module of the process; and the hooks of its `optimizers`, by number."""
    yield name, module
    yield from _hooks("hooks of all modules", vars(torchs_modules), [f"_global{one}" for one in _HOOKS])
    for number, one in enumerate(optimizers):
        yield from _hooks(f"hooks of optimizer {number}", attributes(one), _OF_OPTIMIZERS)


def _parts_of(value: Any) -> Iterator[Root]:
    """What a value holds, by labels."""
    kind: Any = type(value)
    if container := container_of(value):
        yield "#", container.__len__(value)
        yield from _elements(container, value)
    match value:
        case GeneratorType():
            yield from _suspended(value)
        case MethodType():
            yield ".__self__", value.__self__
        case FunctionType() | type():
            yield from ((f".{name}", one) for name, one in _kept_by(value))
        case functools.partial():
            yield from ((f".{number}", one) for number, one in enumerate((value.func, *value.args)))
            yield from ((f".{name}", one) for name, one in value.keywords.items())
        case torch.nn.Module():
            yield from _of_module(value)
        case _BaseDataLoaderIter():
            yield "#", value._num_yielded
        case _ if _is_followed(kind):
            yield from ((f".{name}", one) for name, one in chain(list(attributes(value).items()), slots(value)))
            yield from ((f".{name}", one) for name, one in _of_class(kind))


def _elements(container: Any, value: Any) -> Iterator[Root]:
    if container is dict:
        items = [*islice(dict.items(value), _ELEMENTS)]
        yield from ((f"[{short(repr(key))}]", one) for key, one in items if type(key) in PLAIN)
    elif container in (set, frozenset):
        parts = [*islice(container.__iter__(value), _ELEMENTS)]
        if all(type(one) in PLAIN for one in parts):
            yield ".elements", repr(sorted(map(repr, parts)))
    else:
        yield from ((f"[{at}]", one) for at, one in enumerate([*islice(container.__iter__(value), _ELEMENTS)]))


def _of_module(module: torch.nn.Module) -> Iterator[Root]:
    own = attributes(module)
    for name, one in own["_parameters"].items():
        if one is not None:
            yield f".{name}", one
            yield f".{name}.requires_grad", one.requires_grad
            yield from _hooks(f".{name}.hooks", {hook: getattr(one, hook) for hook in _OF_TENSORS}, _OF_TENSORS)
    yield from ((f".{name}", one) for name, one in own["_buffers"].items())
    yield from ((f".{name}", one) for name, one in own["_modules"].items())
    yield from ((".training", module.training), (".class", type(module)), *_hooks(".hooks", own, _HOOKS))
    derived = {f"{name}{end}" for name in own["_parameters"] for end in ("_g", "_orig")}  # by torch, in each forward
    if not is_known_module(type(module)):
        yield from ((f".{name}", one) for name, one in list(own.items()) if name not in (_LEFT_OUT | derived))


def is_known_module(kind: type) -> bool:
    """Whether a class, or what FSDP has made one of, is of a package whose modules' state is known."""
    made_of = next(one for one in kind.__mro__ if not one.__module__.startswith("torch.distributed."))
    return f"{made_of.__module__}.".startswith(_KNOWN_MODULES)


def _hooks(label: str, own: Mapping[str, Any], names: Iterable[str]) -> Iterator[Root]:
    """The names of the script's hooks, '' for none, and the hooks: those of libraries are the same in every start."""
    hooks = [one for name in names for one in (own.get(name) or {}).values() if not _is_closed(name_of(one))]
    yield label, ", ".join(map(name_of, hooks))
    yield from ((f"{label}[{number}]", one) for number, one in enumerate(hooks))


def _kept_by(value: Any) -> Iterator[tuple[str, Any]]:
    """What a function or a class of the script keeps."""
    if is_a(value, type):
        yield from _of_class(value)
    elif is_a(value, FunctionType) and not (is_installed(value.__code__.co_filename) or _is_closed(name_of(value))):
        yield from (*cells(value), *attributes(value).items())
        yield from ((f"defaults[{at}]", one) for at, one in enumerate(value.__defaults__ or ()) if container_of(one))


def _suspended(generator: Any) -> Iterator[Root]:
    frame = generator.gi_frame
    if frame is None or generator.gi_running or is_installed(frame.f_code.co_filename):
        return
    yield from ((f".{name}", one) for name, one in variables_of(frame).items())
    yield from ((f".{type(one).__name__}", one) for one in _iterated(generator))


def _iterated(iterator: Any, depth: int = 4) -> Iterator[Any]:
    """What the loops of a suspended generator go over, which no variable has: through zip, enumerate and others."""
    for one in gc.get_referents(iterator) if depth else ():
        if isinstance(one, GeneratorType | _BaseDataLoaderIter):
            yield one
        elif type(one) in (tuple, FrameType) or (type(one).__module__ in _PYTHONS and hasattr(type(one), "__next__")):
            yield from _iterated(one, depth - 1)


def _is_closed(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _CLOSED or root in sys.stdlib_module_names


@cache
def _is_followed(kind: Any) -> bool:
    """Whether the objects of a class are looked into."""
    if issubclass(kind, (*FUNCTIONS, *PLAIN, torch.optim.Optimizer, torch.Generator)):
        return False
    known = issubclass(kind, _OPEN) or f"{kind.__module__}.{kind.__name__}".startswith(_OPEN_NAMES)
    return known or not _is_closed(str(kind.__module__))


def _of_class(kind: Any) -> Iterator[Root]:
    """What the script's own classes keep themselves."""
    for base in kind.__mro__:
        if not _is_closed(base.__module__):
            for name, one in list(vars(base).items()):
                if not name.startswith("__") and (type(one) in PLAIN or type(one) in CONTAINERS):
                    yield name, one
