"""Callbacks run right after a module's own code, and names taken from it are what the callback left there."""

import importlib
import importlib.abc
import importlib.machinery
import sys

import pytest

from ft_plugins.adapters.script.script_hooks import PostImportFinder, load_below, on_import
from ft_plugins.launcher.hooks import FirstImport


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package whose `user` takes a name from its `maker`."""
    name = f"imported_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "maker.py").write_text("def make():\n    return 'original'\n")
    (folder / "user.py").write_text("from .maker import make\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[loaded]


def test_a_name_imported_from_a_module_is_what_the_callback_left_there(package):
    called = []

    def replace(module):
        called.append(module.__name__)
        module.make = lambda: "replaced"

    on_import(f"{package}.maker", replace)
    assert called == []
    assert importlib.import_module(f"{package}.user").make() == "replaced"
    importlib.import_module(f"{package}.maker")
    assert called == [f"{package}.maker"]


def test_a_module_already_imported_is_called_at_once(package):
    module = importlib.import_module(f"{package}.maker")
    called = []
    on_import(f"{package}.maker", called.append)
    assert called == [module]


def test_callbacks_run_in_the_order_in_which_they_were_registered(package):
    order = []
    on_import(f"{package}.maker", lambda module: order.append(1))
    on_import(f"{package}.maker", lambda module: order.append(2))
    importlib.import_module(f"{package}.maker")
    assert order == [1, 2]


def test_a_finder_that_asks_all_finders_anew_has_callbacks_run_once(package, monkeypatch):
    called = []
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    sys.meta_path.insert(0, FirstImport(f"{package}.maker", lambda: on_import(f"{package}.maker", register(2))))

    def register(number):
        return lambda module: called.append(number)

    on_import(f"{package}.maker", register(1))
    finder = next(one for one in sys.meta_path if isinstance(one, PostImportFinder))
    sys.meta_path.remove(finder)
    sys.meta_path.insert(0, finder)  # in front, as when it was put there last
    module = importlib.import_module(f"{package}.maker")
    assert called == [1, 2]
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_an_error_in_a_callback_fails_the_import(package):
    def fail(module):
        raise LookupError("drifted")

    on_import(f"{package}.maker", fail)
    for _ in range(2):  # the second attempt must not find an unpatched module
        with pytest.raises(LookupError, match="drifted"):
            importlib.import_module(f"{package}.user")
        assert f"{package}.maker" not in sys.modules


def test_the_module_keeps_its_own_loader_and_source(package):
    import inspect

    on_import(f"{package}.maker", lambda module: None)
    module = importlib.import_module(f"{package}.maker")
    assert "def make" in inspect.getsource(module)
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_the_modules_of_a_package_can_be_loaded_by_another_loader_and_are_called_back_for_all_the_same(package):
    class Built(importlib.abc.Loader):
        def exec_module(self, module):
            module.__dict__.update(make=lambda: "built")

    asked = []

    def choose(spec):
        asked.append(spec.name)
        return Built() if spec.name.endswith("maker") else None

    called = []
    load_below(package, choose)
    on_import(f"{package}.maker", lambda module: called.append(module.make()))
    assert importlib.import_module(f"{package}.user").make() == "built"
    assert called == ["built"] and f"{package}.user" in asked and "colorsys" not in asked
