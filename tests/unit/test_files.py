"""Files are written whole or not at all, and durably where that is asked for."""

import ast
import os
import stat
from pathlib import Path

import pytest

import ft_plugins
from ft_plugins.base import files
from ft_plugins.base.intake import within


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_file_is_replaced_whole_for_its_owner_alone_and_no_pipe_or_link_is_written_to(tmp_path, kind):
    path, foreign, building = tmp_path / "x", tmp_path / "foreign", tmp_path / "x.new"
    foreign.write_text("foreign")
    path.write_text("old")
    os.mkfifo(building) if kind == "pipe" else building.symlink_to(foreign)
    within(10.0, lambda: files.write(path, "new"), "the writer")
    assert path.read_text() == "new" and foreign.read_text() == "foreign"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [foreign, path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    files.write_json(path, [1])
    with pytest.raises(ZeroDivisionError), files.replacing(path) as descriptor:
        files.write_all(descriptor, b"half")
        raise ZeroDivisionError
    assert path.read_text() == "[1]" and list(tmp_path.iterdir()) == [path]


def test_writers_of_other_hosts_with_the_same_thread_id_do_not_take_each_others_temporary_file(tmp_path):
    with files.replacing(tmp_path / "x", shared=True) as one:  # this thread has one id, as two hosts' threads may have
        files.write(tmp_path / "x", "other", shared=True)
        files.write_all(one, b"one")
    assert (tmp_path / "x").read_text() == "one" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("durable", [True, False])
def test_content_is_synced_before_the_rename_and_the_folder_after_it(durable, tmp_path, monkeypatch):
    done = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor):
        done.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        sync(descriptor)

    def renamed(source, target):
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with files.replacing(tmp_path / "x", durable=durable, before_rename=lambda _: done.append("before rename")):
        pass
    steps = ["sync file", "before rename", "rename", "sync folder"]
    assert done == (steps if durable else steps[1:3])


def test_what_several_nodes_may_write_in_storage_is_written_as_shared():
    package, alone = Path(ft_plugins.__file__).parent, set()
    for path in [*package.glob("smp/storage/*.py"), *package.glob("snapshot/checkpoint/*.py")]:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            writes = ast.unparse(call.func).removeprefix("files.") in ("replacing", "write_digested")
            if writes and not any(each.arg == "shared" for each in call.keywords):
                alone.add(f"{path.name}: {ast.unparse(call)}")
    assert alone == {"index.py: write_digested(path, content)"}, "in the run directory"


# ---- for their owner alone, whatever the umask ----

# for people or their tools, of whom the umask says who they are; or no file of a disk
FOR_PEOPLE = {
    "adapters/deepspeed/export.py", "adapters/export_command.py", "adapters/megatron/export.py",
    "adapters/megatron/torch_dist.py", "adapters/rules/page.py", "cli/report_command.py",
    "cli/trace_command.py", "report/plan_pictures.py",
}  # fmt: skip
IN_PROC = {"launcher/preload/new_process.py", "smp/exchange/traffic.py"}


def makes_for_others(call):
    """Whether a call makes a file or a folder of which the umask says who may use it."""
    words, function = ast.unparse(call), ast.unparse(call.func)
    name = function.rpartition(".")[2]
    if name in ("makedirs", "mkdir"):
        return f"mode={0o700}" not in words or "parents=True" in words  # those above it follow the umask
    if function == "os.open":
        may_create = "O_CREAT" in words or isinstance(call.args[1], ast.Name)
        return may_create and not words.endswith(f", {0o600})")
    if name == "open":
        return any(f"'{mode}" in words for mode in "wax") and "opener=" not in words
    return name in ("write_text", "write_bytes", "copyfile", "savefig")


def test_whatever_makes_a_file_or_a_folder_makes_it_for_its_owner_or_is_known_to_make_it_for_people():
    package, found = Path(ft_plugins.__file__).parent, set()
    for path in package.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if any(makes_for_others(call) for call in calls):
            found.add(str(path.relative_to(package)))
    assert found == FOR_PEOPLE | IN_PROC


def test_folders_that_are_made_for_another_are_the_owners_alone_too(tmp_path):
    before = os.umask(0)
    try:
        files.make_private(tmp_path / "a" / "b")
        files.make_private(tmp_path / "a" / "b")
        with open(tmp_path / "a" / "b" / "c", "w", opener=files.private) as file:
            file.write("")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/c")]
    assert modes == [0o700, 0o700, 0o600]
