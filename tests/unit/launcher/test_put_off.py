"""What imports ahead of a rank change happens when the rank imports: in this process, which forks none."""

import atexit
import importlib
import os
import sys
import warnings
import weakref

import pytest

from ft_plugins.config import launch_context
from ft_plugins.launcher.hooks import register
from ft_plugins.launcher.preload.traces import put_off

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not read specs")

CHANGES = """
import atexit, os, warnings
os.environ["PUT_OFF_{name}"] = "its own"
warnings.filterwarnings("ignore", "{name}")
atexit.register(print, "no function of this module")
@atexit.register
def at_exit(): pass
"""


def state():
    return dict(os.environ), [str(each) for each in warnings.filters], atexit._ncallbacks()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes modules; afterwards all is as before."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    environment, filters, modules = dict(os.environ), list(warnings.filters), set(sys.modules)

    def write(name, text=CHANGES):
        path = (tmp_path / name.replace(".", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(name=name.upper().replace(".", "_")))

    yield write
    for name in sys.modules.keys() - modules:
        for function in [value for value in vars(sys.modules[name]).values() if callable(value)]:
            atexit.unregister(function)
        del sys.modules[name]
    atexit.unregister(print)
    warnings.filters[:] = filters
    os.environ.clear()
    os.environ.update(environment)


def ahead(*names):
    for name in names:
        with put_off():
            importlib.import_module(name)


def test_what_an_import_changes_is_there_once_a_module_of_it_is_imported(module):
    module("late")
    environment, filters, exits = state()
    ahead("late")
    assert state() == (environment, filters, exits + 1), "what belongs to no module of the import is kept"
    import late

    assert os.environ["PUT_OFF_LATE"] == "its own" and len(warnings.filters) == len(filters) + 1
    assert atexit._ncallbacks() == exits + 2 and late.__spec__.loader is late.__loader__
    found = state()
    importlib.import_module("late")
    assert state() == found, "once"


@pytest.mark.parametrize("words", ["from package import late", "import package.late", "import package; package.late"])
def test_a_module_in_a_package_that_is_there_is_imported_however_that_is_written(module, words):
    lazy = "def __getattr__(name): import importlib; return importlib.import_module(f'package.{{name}}')"
    module("package.__init__", lazy)
    module("package.late")
    ahead("package", "package.late")
    assert "PUT_OFF_PACKAGE_LATE" not in os.environ
    exec(words)
    assert os.environ["PUT_OFF_PACKAGE_LATE"] == "its own"
    assert sys.modules["package"].late is sys.modules["package.late"]


def test_a_module_that_was_not_imported_ahead_comes_after_its_package(module):
    register(launch_context({}))
    module("package.__init__", "")
    module("package.late.__init__")
    module("package.late.more", "import os\nFOUND = os.environ['PUT_OFF_PACKAGE_LATE___INIT__']")
    ahead("package", "package.late")
    import package.late.more

    assert package.late.more.FOUND == "its own"


def test_what_a_later_import_uses_of_one_that_waits_is_there_for_it_and_waits_with_it(module):
    module("early")
    module("later", "import early, os\nFOUND = os.environ['PUT_OFF_EARLY']")
    before = state()
    ahead("early", "later")
    assert state()[:2] == before[:2]
    exits = atexit._ncallbacks()
    import later

    assert later.FOUND == os.environ["PUT_OFF_EARLY"] == "its own" and atexit._ncallbacks() == exits + 1


def test_a_variable_that_the_script_has_set_meanwhile_stays(module, monkeypatch):
    module("late")
    ahead("late")
    monkeypatch.setenv("PUT_OFF_LATE", "the script's")
    importlib.import_module("late")
    assert os.environ["PUT_OFF_LATE"] == "the script's"


def test_an_import_that_changes_nothing_does_not_wait(module):
    module("plain", "import weakref")
    ahead("plain")
    assert type(sys.modules["plain"].__spec__) is type(weakref.__spec__)
