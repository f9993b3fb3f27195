"""Exporting, the parts that need no job: which blocks make a checkpoint, arguments and back, files of bounded size."""

import argparse
import json
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import PosixPath

import pytest
import torch

from ft_plugins.adapters import export_command as export
from ft_plugins.adapters.megatron.export import arguments_from_plain, arguments_to_plain, assemble
from ft_plugins.errors import ConfigError, StorageError
from ft_plugins.snapshot.checkpoint.index import Index

# ---- assembly ----


def told(rank, *tensors, objects=None):
    """Each tensor: source, replica id, blocks (key, shape, offset, size)."""
    entries = [
        {"source": source, "dtype": "float32", "group": 0, "replica": replica, "shape": [2, 4],
         "blocks": [[*block, []] for block in blocks]}
        for source, replica, blocks in tensors
    ]  # fmt: skip
    names = {"groups": [[rank, rank + 10]], "tensors": entries, "objects": objects or []}
    return Index(rank, 1, {}, names)


def block(offset):
    return ["w", [4, 4], [offset, 0], [2, 4]]


def anywhere(source, ranks):
    return 0


def test_a_block_is_taken_from_the_replica_that_megatron_saves():
    stages = [told(3, ("tied", [1, 0, 0], [block(0)])), told(0, ("first", [0, 0, 1], [block(0)]))]
    other = told(1, ("first", [0, 0, 0], [block(2)]))
    made = assemble([*stages, other], anywhere)
    assert [(each.source, each.offset, each.ranks) for each in made.blocks] == [
        ("first", (0, 0), (0, 10)),
        ("first", (2, 0), (1, 11)),
    ]


def test_a_tensor_with_a_gap_is_refused():
    with pytest.raises(StorageError, match="'w' has 16 elements, but the blocks of all ranks cover 8: .* incomplete"):
        assemble([told(0, ("first", [0, 0, 0], [block(0)]))], anywhere)


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ([([0, 0], [3, 4]), ([2, 0], [1, 4])], "blocks overlap"),  # one row is missing, another is there twice
        ([([0, 0], [4, 2]), ([0, 1], [4, 2])], "blocks overlap"),
        ([([0, 0], [2, 4]), ([3, 0], [2, 4])], "beyond it"),
    ],
)
def test_a_gap_and_an_overlap_of_the_same_size_are_refused(blocks, problem):
    with pytest.raises(StorageError, match=f"'w' .*{problem}"):
        assemble([told(0, *(("first", [0], [["w", [4, 4], *each]]) for each in blocks))], anywhere)


def test_blocks_in_any_order_and_of_no_element_cover_a_tensor():
    blocks = [([2, 1], [2, 3]), ([0, 0], [2, 4]), ([2, 0], [2, 1]), ([2, 2], [0, 2])]
    made = assemble([told(0, *(("first", [0], [["w", [4, 4], *each]]) for each in blocks))], anywhere)
    assert len(made.blocks) == 4


def test_ranks_that_disagree_about_a_tensor_are_refused():
    other = ["w", [8, 4], [2, 0], [2, 4]]
    with pytest.raises(StorageError, match="on rank 1 .* on rank 0"):
        assemble([told(0, ("a", [0], [block(0)])), told(1, ("a", [0], [other]))], anywhere)


def test_objects_are_those_of_the_smallest_replica():
    first, second = ({"key": "k", "replica": [0, 0, n], "value": ["value", str(n)]} for n in (0, 1))
    assert assemble([told(0, objects=[second]), told(1, objects=[first])], anywhere).objects == {"k": ["value", "0"]}


# ---- arguments ----


def test_arguments_come_back_with_their_types():
    given = argparse.Namespace(
        lr=1e-3, none=None, flag=True, name="x", sizes=[1, 2], betas=(0.9, 0.95), params_dtype=torch.bfloat16,
        folder=PosixPath("/a"), mapping={"a": (1,)}, exit_signal=signal.SIGTERM, model=torch.nn.Linear(1, 1),
        function=print, consumed_train_samples=0,
    )  # fmt: skip
    kept = json.loads(json.dumps(arguments_to_plain(given)))
    assert kept["left_out"] == ["function", "model"]
    back = arguments_from_plain(kept, {"consumed_train_samples": 32})
    expected = {name: value for name, value in vars(given).items() if name not in ("function", "model")}
    assert vars(back) == {**expected, "consumed_train_samples": 32}
    assert type(back.exit_signal) is signal.Signals and type(back.betas) is tuple


@pytest.mark.parametrize(
    ("module", "kind", "name"),
    [("os", "system", "x"), ("signal", "signal", "x"), ("signal", "Signals", "SIGNONE"), ("megatron", "x", "y")],
)
def test_only_enums_of_megatron_are_looked_up(module, kind, name):
    value = {"ftp": "enum", "module": module, "class": kind, "name": name}
    with pytest.raises(StorageError, match=f"{module}.{kind}.{name} does not exist in the installed version"):
        arguments_from_plain({"values": {"a": value}}, {})


# ---- files ----

WRITE = """
import json, sys, weakref
from pathlib import Path
import torch
from ft_plugins.adapters.megatron import prepare
prepare()
from ft_plugins.adapters.megatron.export import TensorBlock
from ft_plugins.adapters.megatron.torch_dist import write

ROWS, FILE = 64, 40_000
made = ((f"{row}", (0,), (1, 256), None) for row in range(ROWS))
blocks = [TensorBlock("w", (64, 256), (row, 0), (1, 256), "float32", *one) for row, one in enumerate(made)]
alive, peak = set(), [0]

def tensor(block):
    made = torch.full(block.size, float(block.offset[0]))
    alive.add(block.source)
    weakref.finalize(made.untyped_storage(), alive.discard, block.source)
    peak[0] = max(peak[0], len(alive))
    return made

folder = Path(sys.argv[1])
write(folder, blocks, tensor, {"extra/shard_0_1": None}, {"iteration": 3}, FILE)
import torch.distributed.checkpoint as dcp
found = {"w": torch.empty(64, 256), "extra/shard_0_1": 1}
dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
same = bool((found["w"] == torch.arange(64.0)[:, None]).all())
files = sorted(path.name for path in folder.glob("*.distcp"))
print(json.dumps({"peak": peak[0], "same": same, "object": found["extra/shard_0_1"], "files": files}))
"""


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra [megatron]")
def test_tensors_are_held_no_longer_than_their_file(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", WRITE, str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] and found["object"] == [None]
    assert len(found["files"]) == 2, "64 KiB in files of 40,000 bytes"
    assert found["peak"] <= 40, "39 tensors of 1 KiB fit into a file, and one is on its way"


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # as where it is not installed
from importlib import import_module
export = import_module(f"ft_plugins.adapters.{sys.argv[1]}.export")
from ft_plugins.errors import UnsupportedError
try:
    export.export(None, None)
except UnsupportedError as error:
    print(error)
"""


@pytest.mark.parametrize(("extra", "package"), [("megatron", "megatron-core"), ("deepspeed", "deepspeed")])
def test_where_the_framework_is_not_installed_that_is_said(extra, package):
    done = subprocess.run([sys.executable, "-c", WITHOUT, extra], capture_output=True, text=True, timeout=120)
    assert f"{package} is not installed here: pip install 'ft_plugins[{extra}]'" in done.stdout, done.stderr


# ---- the target ----


def test_a_target_in_use_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, words in (("full", "not empty"), ("full/file", "not a folder"), ("link", "not a folder")):
        with pytest.raises(ConfigError, match=words):
            export.export(tmp_path / "no checkpoint", tmp_path / name)
    with pytest.raises(StorageError, match="is not a complete checkpoint"):
        export.export(tmp_path / "no checkpoint", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "link"]
