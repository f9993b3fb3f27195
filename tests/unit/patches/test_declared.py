"""A patch applies as declared, once, or says by name why it does not."""

from __future__ import annotations

from types import ModuleType

import pytest

from ft_plugins.errors import PatchError, UnsupportedError
from ft_plugins.patches import cpu_patches, cpu_stubs
from ft_plugins.patches.declared import Patch, Stub


def upstream() -> ModuleType:
    """A module as an upstream project might have it."""
    module = ModuleType("upstream.part")
    module.__file__ = "/site-packages/upstream/part.py"

    def double(value: int) -> int:
        return value * 2

    class Worker:
        def run(self, times: int) -> int:
            return times

    module.__dict__.update(double=double, Worker=Worker)
    return module


def patch(symbol: str = "double", **more: object) -> Patch:
    given: dict[str, object] = {"replace": lambda original: lambda value: original(value) + 1, **more}
    return Patch("torch", "upstream.part", symbol, ("1.2.3",), "the reason", **given)  # type: ignore[arg-type]


def test_the_replacement_wraps_the_original_once_however_often_it_is_applied() -> None:
    module = upstream()
    assert patch().apply(module)
    assert not patch().apply(module)
    assert module.double(3) == 7


def test_a_method_is_replaced_on_its_class() -> None:
    module = upstream()
    method = patch("Worker.run", replace=lambda original: lambda self, times: original(self, times) * 10)
    assert method.apply(module)
    assert module.Worker().run(2) == 20


@pytest.mark.parametrize(
    ("drifted", "found"),
    [
        (patch("halve"), "the symbol does not exist"),
        (patch("Manager.run"), "the symbol does not exist"),
        (patch("Worker.walk"), "the symbol does not exist"),
        (patch(parameters=("value", "times")), "expected parameters ('value', 'times'), found ('value',)"),
        (patch(contains=("value * 3",)), "expected 'value * 3' in its source and did not find it"),
    ],
)
def test_a_patch_that_no_longer_applies_names_file_symbol_version_and_reason(drifted: Patch, found: str) -> None:
    module = upstream()
    with pytest.raises(PatchError) as raised:
        drifted.apply(module)
    for part in (drifted.symbol, "/site-packages/upstream/part.py", "torch 2.", "1.2.3", "the reason", found):
        assert part in str(raised.value)
    assert module.double(3) == 6


def test_an_absent_symbol_is_added_and_an_existing_one_left_alone() -> None:
    module = upstream()
    added = patch("triple", absent=True, replace=lambda original: original or 3)
    assert added.apply(module) and module.triple == 3
    assert not patch(absent=True).apply(module)
    assert module.double(3) == 6


def test_a_stub_answers_what_is_true_and_refuses_the_rest_by_name() -> None:
    module = ModuleType("upstream.kernels")
    Stub("torch", "upstream.kernels", ("1",), "it needs a device", "nothing", {"is_on": lambda: False}).fill(module)
    assert module.is_on() is False
    with pytest.raises(UnsupportedError, match="upstream.kernels.fuse cannot be used .* it needs a device"):
        module.fuse(1)
    with pytest.raises(AttributeError):
        _ = module.__path__


def test_every_patch_of_the_shim_is_declared_in_full_and_no_symbol_twice() -> None:
    declared = cpu_patches()
    assert len({(one.module, one.symbol) for one in declared}) == len(declared)
    for one in (*declared, *cpu_stubs()):
        assert one.versions and one.reason and one.distribution in {"torch", "megatron-core", "python"}
