"""Modules that import triton at their top level load without it; every other module finds it absent."""

import importlib
import sys
from functools import partial
from importlib.util import find_spec

import pytest

from ft_plugins.adapters.script.script_hooks import load_below
from ft_plugins.errors import UnsupportedError
from ft_plugins.patches.megatron_missing import loader, needed_by

KERNELS = """
import triton
import triton.language as tl
from packaging import version
from triton.language.extra import libdevice

TRITON_22 = version.parse(triton.__version__) >= version.parse("2.2.0")
WIDTH = tl.constexpr(4)
ENABLED = False


@triton.autotune(configs=[triton.Config({"BLOCK": 4}, num_stages=2)], key=["size"])
@triton.jit
def add_kernel(pointer, size, BLOCK: tl.constexpr):
    return libdevice.add(pointer, size)


def add(size):
    block = min(1024, triton.next_power_of_2(size))
    add_kernel[(block,)](None, size, BLOCK=block)


def launch():
    add_kernel[(1,)](None, 1, BLOCK=1)


def is_enabled():
    return ENABLED


def looks_for_it():
    import triton
    return triton
"""
GUARDED = """
try:
    import triton
    found = True
except ImportError:
    found = False
"""

pytestmark = pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")


@pytest.fixture
def package(tmp_path, monkeypatch):
    name = f"kernels_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    for module, text in (("__init__", ""), ("kernels", KERNELS), ("guarded", GUARDED), ("other", "import triton")):
        (folder / f"{module}.py").write_text(text)
    (tmp_path / f"{name}_outside.py").write_text("import triton\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield name
    for loaded in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[loaded]


def test_the_modules_own_code_runs_and_its_kernels_refuse_by_name(package):
    load_below(package, partial(loader, ["triton", "torchvision"]))
    kernels = importlib.import_module(f"{package}.kernels")
    assert kernels.is_enabled() is False and kernels.TRITON_22 is False
    for refused, name in ((kernels.launch, "add_kernel"), (lambda: kernels.add(3), "triton.next_power_of_2")):
        with pytest.raises(UnsupportedError, match=f"{package}.kernels: {name} needs triton, which is not installed"):
            refused()
    assert kernels.looks_for_it().jit


def test_whoever_else_looks_for_triton_finds_it_absent(package):
    load_below(package, partial(loader, ["triton", "torchvision"]))
    importlib.import_module(f"{package}.kernels")
    assert importlib.import_module(f"{package}.guarded").found is False, "it has a way without triton"
    assert find_spec("triton") is None and "triton" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="triton"):
        importlib.import_module(f"{package}_outside")


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("import triton", True),
        ("import os, triton.language as tl", True),
        ("from triton.language import load", True),
        ("from .triton import load", False),
        ("import tritonclient", False),
        ("if True:\n    import triton", False),
        ("def f():\n    import triton", False),
        ("# import triton\nimport os", False),
    ],
)
def test_a_module_is_known_by_an_import_at_its_top_level(source, needs):
    assert needed_by(source.encode()) == (("triton",) if needs else ())
