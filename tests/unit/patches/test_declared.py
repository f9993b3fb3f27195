"""A patch applies as declared, once, or says by name why it does not."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ft_plugins.errors import PatchError
from ft_plugins.patches import cpu_patches, untested
from ft_plugins.patches.declared import Patch, around
from ft_plugins.patches.versions import DEEPSPEED, MEGATRON


def upstream():
    """A module as an upstream project might have it."""
    module = ModuleType("upstream.part")
    module.__file__ = "/site-packages/upstream/part.py"

    def double(value):
        return value * 2

    class Worker:
        def run(self, times):
            return times

    module.__dict__.update(double=double, Worker=Worker)
    return module


def patch(symbol="double", **more):
    given = {"replace": around(lambda original, value: original(value) + 1), **more}
    return Patch("torch", "upstream.part", symbol, ("1.2.3",), "the reason", **given)


def test_the_replacement_wraps_the_original_once_however_often_it_is_applied():
    module = upstream()
    for _ in range(2):
        patch().apply(module)
    assert module.double(3) == 7


def test_a_method_is_replaced_on_its_class():
    module = upstream()
    method = patch("Worker.run", replace=lambda original: lambda self, times: original(self, times) * 10)
    method.apply(module)
    assert module.Worker().run(2) == 20


@pytest.mark.parametrize(
    ("drifted", "found"),
    [
        (patch("halve"), "the symbol does not exist"),
        (patch("Manager.run"), "the symbol does not exist"),
        (patch("Worker.walk"), "the symbol does not exist"),
        (patch(parameters=("value", "times")), "expected parameters ('value', 'times'), found ('value',)"),
        (patch(contains=("value * 3",)), "its source does not contain 'value * 3'"),
    ],
)
def test_a_patch_that_no_longer_applies_names_file_symbol_version_and_reason(drifted, found):
    module = upstream()
    with pytest.raises(PatchError) as raised:
        drifted.apply(module)
    for part in (drifted.symbol, "/site-packages/upstream/part.py", "torch 2.", "1.2.3", "the reason", found):
        assert part in str(raised.value)
    assert module.double(3) == 6


def test_an_absent_symbol_is_added_and_an_existing_one_left_alone():
    module = upstream()
    added = patch("triple", absent=True, replace=lambda original: original or 3)
    added.apply(module)
    patch(absent=True).apply(module)
    assert module.triple == 3 and module.double(3) == 6


CHECKOUT = """
import sys
sys.path.insert(0, sys.argv[1])
from ft_plugins.adapters.megatron import prepare
prepare()
try:
    import megatron.core.jit
except Exception as error:
    print(type(error).__name__, error)
"""


def test_the_version_that_is_named_is_that_of_the_checkout_and_not_of_the_installed_package(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("__version__ = '0.99.7'\n")
    (core / "jit.py").write_text("")  # jit_fuser is gone
    done = subprocess.run([sys.executable, "-c", CHECKOUT, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("PatchError"), done.stderr[-2000:]
    assert "no longer applies to megatron-core 0.99.7: the symbol does not exist" in done.stdout
    assert f"It was checked with {', '.join(MEGATRON)}" in done.stdout


def test_a_version_is_untested_where_no_version_of_its_series_is_in_the_table_of_versions():
    assert untested("Megatron", MEGATRON[0]) == untested("Megatron", "0.16.9") == untested("DeepSpeed", "0.19.8") == ""
    assert untested("Megatron", "0.99.0").startswith("Megatron 0.99.0 is untested")
    page = Path(__file__).parents[3].joinpath("docs", "versions.md").read_text()
    table = page.partition("<!-- versions")[2].partition("<!--")[0]
    released = re.findall(r"^\| ([\w-]+) (\d+\.\d+\.\d+) \|", table, re.MULTILINE)
    assert len(released) >= 6
    for name, version in released:
        known = DEEPSPEED if name == "deepspeed" else MEGATRON
        assert version in known, f"{name} {version} is in docs/versions.md and not in patches/versions.py"


def test_every_patch_of_the_shim_is_declared_in_full_and_no_symbol_twice():
    declared = cpu_patches()
    assert len({(one.module, one.symbol) for one in declared}) == len(declared)
    for one in declared:
        assert one.versions and one.reason and one.distribution in {"torch", "megatron-core", "python"}
