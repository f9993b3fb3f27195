"""What a rank has imported, in a file."""

import json
import sys
from types import ModuleType

import pytest

from ft_plugins.model import imported


def test_a_reader_finds_the_modules_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "not importable", ModuleType("x"))
    monkeypatch.setitem(sys.modules, "made_by_hand", ModuleType("made_by_hand"))
    imported.write(tmp_path, 1, 7)
    path = imported.path_of(tmp_path, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    found = imported.read(tmp_path, 1)
    assert found.token == 7 and found.names.index("json") < found.names.index("ft_plugins.model.imported")
    assert not {"not importable", "made_by_hand"} & set(found.names)
    assert imported.read_record(path) == found and imported.read_record(tmp_path / "none") == imported.Imported()


def test_variables_that_a_script_sets_after_a_module_had_read_them_are_known(monkeypatch):
    monkeypatch.setattr(imported, "_found", {})
    imported.found_by_modules({"READ": None, "KEPT": "1"})
    assert imported.outdated({"READ": "x", "KEPT": "1"}) == ("READ",) and imported.outdated({"KEPT": "1"}) == ()


@pytest.mark.parametrize("name", ["../x", "os;x", "a" * 300, ".relative", 3])
def test_what_cannot_be_the_name_of_a_module_is_refused(tmp_path, name):
    imported.write(tmp_path, 0, 1)
    path = imported.path_of(tmp_path, 0)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"names": ["json", name]}))
    with pytest.raises(ValueError):
        imported.read(tmp_path, 0)
