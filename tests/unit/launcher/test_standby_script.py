"""Which statements of a script a standby worker executes ahead of time."""

from __future__ import annotations

import ast

import pytest

from ft_plugins.launcher.preload.standby_script import beginning


def executed(source: str) -> list[str]:
    return [ast.unparse(statement) for statement in beginning(source, "train.py")]


HARMLESS = [
    "'About it.'",
    "from __future__ import annotations",
    "import os, sys",
    "from pathlib import Path",
    "ROOT = Path(__file__).resolve().parent",
    "SIZES: dict[str, int] = {'a': 1 << 4}",
    "sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))",
    "os.environ['NVTE_FLASH_ATTN'] = '0'",
    "os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')",
    "try:\n    import apex\nexcept ImportError:\n    apex = None",
    "if sys.version_info >= (3, 8):\n    import ast",
    "def parse(argv, count=3):\n    return run()",
    "_PROGRAM_START_TIME = time.time()",
    "rank = int(os.environ.get('RANK', 0))",
    "if os.environ.get('DEBUG'):\n    import pdb",
    "if rank != 0:\n    warnings.filterwarnings('ignore', category=UserWarning)",
    "if ROOT not in sys.path:\n    sys.path.insert(0, ROOT)",
    "if 'HOME' in os.environ:\n    import home",
]


@pytest.mark.parametrize("statement", HARMLESS)
def test_imports_and_what_says_how_to_import_are_executed(statement: str) -> None:
    assert len(executed(f"import torch\n{statement}\nimport model")) == 3


@pytest.mark.parametrize(
    "statement",
    [
        "prepare()",
        "torch.nn.Linear = Patched",
        "torch.set_default_dtype(torch.bfloat16)",
        "RANK = int(os.environ['RANK'], ask())",
        "dist.init_process_group('gloo')",
        "model = build()",
        "names = [name for name in compute()]",
        "with quiet():\n    import noisy",
        "for name in names:\n    import_module(name)",
        "class Model(torch.nn.Module): pass",
        "@cached\ndef f(): pass",
        "def f(x=compute()): pass",
        "try:\n    start()\nexcept ImportError: pass",
        "os.environ['PORT'] = str(free_port())",
        "sys.path.insert(0, find())",
        "del sys.modules['torch']",
        "x, y = 1, 2",
        "words = f'{start()}'",
        "try:\n    import own\nexcept ImportError:\n    sys.path.insert(0, '..')\n    import own",
        "try:\n    import flash\nexcept ImportError:\n    os.environ['FLASH'] = '0'",
        "if ROOT:\n    sys.path.append(ROOT)\n    import own",
        "if 'own' not in sys.modules:\n    import own",
        "HOST = os.environ.get('MASTER_ADDR')",
        "HOST = os.environ['MASTER_ADDR']",
        "RESTARTS = int(os.getenv('TORCHELASTIC_RESTART_COUNT', '0'))",
        "if 'MASTER_ADDR' in os.environ:\n    import own",
        "value = os.environ[name]",
    ],
)
def test_it_ends_before_a_statement_that_may_do_more(statement: str) -> None:
    """What comes after it may depend on what it does: a module binds names that it has changed."""
    assert executed(f"import torch\n{statement}\nimport model") == ["import torch"]


def test_the_guard_of_the_script_belongs_to_it_and_nothing_after_it() -> None:
    source = "import torch\nif __name__ == '__main__':\n    from model import main\n    main()\nimport later"
    assert executed(source) == ["import torch", "from model import main"]
    assert executed("if __name__ == '__main__':\n    import a\nimport b") == ["import a"]
    assert executed("if __name__ == 'other':\n    import a\nimport b") == [
        "if __name__ == 'other':\n    import a",
        "import b",
    ]


def test_what_is_no_script_is_an_error() -> None:
    with pytest.raises(SyntaxError, match=r"train\.py"):
        beginning("import", "train.py")
