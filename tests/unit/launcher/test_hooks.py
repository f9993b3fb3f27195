"""What is registered before a script runs."""

import importlib
import sys
from functools import partial

import pytest

from ft_plugins.adapters.script.script_hooks import on_import
from ft_plugins.launcher.hooks import FirstImport


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `framework_x` with a module, that records what had happened before it ran."""
    (tmp_path / "framework_x").mkdir()
    (tmp_path / "framework_x" / "__init__.py").write_text("import sys; seen = list(sys.framework_x_actions)")
    (tmp_path / "framework_x" / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "framework_x_actions", [], raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "framework_x"
    for name in [name for name in sys.modules if name.startswith("framework_x")]:
        del sys.modules[name]


def test_the_action_comes_once_and_before_any_code_of_the_package(package):
    actions = sys.framework_x_actions
    sys.meta_path.insert(0, FirstImport(package, lambda: actions.append("prepared")))
    importlib.import_module("colorsys")
    assert actions == []
    module = importlib.import_module(f"{package}.part")
    importlib.import_module(package)
    assert actions == ["prepared"]
    assert sys.modules[package].seen == ["prepared"] and module.__file__


def test_an_error_of_the_action_reaches_whoever_imports(package):
    def fail():
        raise RuntimeError("a patch no longer applies")

    sys.meta_path.insert(0, FirstImport(package, fail))
    with pytest.raises(RuntimeError, match="no longer applies"):
        importlib.import_module(package)


def test_the_action_may_wait_for_the_package_itself_to_have_run(package):
    """A finder that it puts in front is asked, although the search has begun."""
    called = []
    action = partial(on_import, package, lambda module: called.append(module.__name__))
    sys.meta_path.insert(0, FirstImport(package, action))
    importlib.import_module(package)
    assert called == [package]
