"""What a preloader imports, from the text of a script and from what its ranks had imported."""

import pytest

from ft_plugins.launcher.preload.what_to_import import (
    BASE,
    ImportStatement,
    first_on_path,
    in_order,
    read_when_loaded,
    statements,
    variables_set,
    withheld,
)

SCRIPT = """
from __future__ import annotations
import numpy as np, torch.nn
from typing import TYPE_CHECKING
from beside import thing
if TYPE_CHECKING:
    import never
try:
    from fast import loader, *
except ImportError:
    loader = None
from . import sibling
def later():
    import seldom
if __name__ == "__main__":
    import deepspeed.pipe
"""


def test_the_imports_that_run_first_are_found_in_their_order_with_those_of_modules_beside_the_script():
    texts = {"beside": "import megatron.core\nimport beside\nfrom further import x", "further": "import beside, zlib"}
    script = SCRIPT.replace("loader, *", "loader")
    found = [each for each in statements(script, texts.get) if each.package not in ("__future__", "typing")]
    assert found == [
        ImportStatement("numpy"), ImportStatement("torch.nn"), ImportStatement("megatron.core"),
        ImportStatement("beside"), ImportStatement("beside"), ImportStatement("zlib"),
        ImportStatement("further", ("x",)), ImportStatement("beside", ("thing",)), ImportStatement("fast", ("loader",)),
        ImportStatement("deepspeed.pipe"),
    ]  # fmt: skip


def test_packages_that_are_not_installed_or_left_to_the_ranks_are_not_imported():
    named = [
        ImportStatement("deepspeed.pipe", ("LayerSpec",)),
        ImportStatement("beside"),
        ImportStatement("apex.optim"),
    ]
    recorded = [
        "torch", "ft_plugins.adapters.plain", "ft_plugins.launcher.worker", "ft_plugins.deepspeed", "yaml",
        "ft_plugins.adapters.megatron.core", "ft_plugins.adapters.megatron.core_loop",
    ]  # fmt: skip
    found = in_order(
        named, recorded, ["apex", "ft_plugins.adapters.megatron.core"], lambda package: package != "beside"
    )
    assert [each.module for each in found] == [
        *BASE,
        "deepspeed.pipe",
        "torch",
        "ft_plugins.adapters.plain",
        "yaml",
        "ft_plugins.adapters.megatron.core_loop",
    ]


@pytest.mark.parametrize("framework", ["deepspeed", "megatron"])
def test_our_adapter_of_a_framework_that_is_a_checkout_is_not_imported_ahead(framework):
    adapter = f"ft_plugins.adapters.{framework}"
    recorded = [f"{framework}.core", "ft_plugins.adapters.data", adapter, f"{adapter}.state", f"{adapter}.a.b"]
    checkout = in_order([], recorded, [], lambda package: package != framework)
    assert [each.module for each in checkout] == [*BASE, "ft_plugins.adapters.data"]
    assert [each.module for each in in_order([], recorded, [], lambda package: True)] == [*BASE, *recorded]
    assert ImportStatement(f"{adapter}.a.b").unit == adapter and ImportStatement(f"{framework}.core").unit == framework


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("os.environ['A'] = '1'\ndef f():\n    del os.environ['B']", {"A", "B"}),
        ("os.environ.setdefault('A', '1'); environ.pop('B', None)", {"A", "B"}),
        ("os.environ.update({'A': '1'}, B='2'); os.putenv('C', '3')", {"A", "B", "C"}),
        ("os.environ |= {'A': '1'}", {"A"}),
        ("os.environ.get('A'); os.environ['B']; other['C'] = 1; options.update(D=1)", set()),
        ("os.environ[name] = '1'", set()),
    ],
)
def test_the_variables_that_a_script_sets_by_name_are_known(text, names):
    assert variables_set(text) == names


def test_variables_of_a_rank_are_withheld_and_those_of_libraries_in_c_are_told_apart():
    ranks = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "FTP_TOKEN",
        "PL_GLOBAL_SEED",
    ]
    assert all(map(withheld, ranks)) and not any(
        map(withheld, ["OMP_NUM_THREADS", "TORCH_COMPILE_ON_ONE_RANK", "SEEDS"])
    )
    assert read_when_loaded(["OMP_NUM_THREADS", "WANDB_MODE", "MALLOC_ARENA_MAX"]) == [
        "MALLOC_ARENA_MAX",
        "OMP_NUM_THREADS",
    ]


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        ("sys.path.insert(0, '/a'); sys.path.append(x); sys.path += y; sys.path.extend(z); len(sys.path)", ["/a"]),
        ("sys.path[0] = str(Path(__file__).resolve().parents[1] / 'a')", ["/a"]),
        ("import os\nHERE = os.path.dirname(__file__)\nsys.path.insert(0, os.path.join(HERE, 'a'))", ["/s/a"]),
        ("def f(path): path.insert(0, 1)", []),
    ],
)
def test_folders_that_a_script_puts_first_on_the_path_are_read(text, folders):
    assert first_on_path(text, "/s/t.py") == folders


@pytest.mark.parametrize(
    "text",
    [
        "sys.path.insert(0, folder)", "sys.path = [x, *sys.path]", "sys.path[:0] = [x]", "del sys.path[0]",
        "sys.path.remove(x)", "A = 1; A = 2; sys.path.insert(0, A)", "sys.path.insert(0, f'{x}')",
        "sys.path.insert(0, os.environ['X'])", "A = A; sys.path.insert(0, A)", "sys.path.insert(0, Path('x'))"
        "; sys.path.insert(0, open('x').read())", "str = 1; sys.path.insert(0, str('x'))", "sys.path.insert(0, 1)",
    ],
)  # fmt: skip
def test_a_path_that_reading_does_not_tell_is_refused(text):
    with pytest.raises(ValueError):
        first_on_path(text, "/s/t.py")
