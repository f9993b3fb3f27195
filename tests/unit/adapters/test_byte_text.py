"""The example's text and sampler: positions decide what is read."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ft_plugins.errors import ConfigError


@pytest.fixture(scope="module")
def byte_text():
    path = Path(__file__).resolve().parents[3] / "launch" / "examples" / "byte_text.py"
    spec = importlib.util.spec_from_file_location("byte_text_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def sampler(byte_text, **fields):
    text = byte_text.Text("numbers", np.arange(250, dtype=np.uint8))
    known = {"seed": 1, "sequence": 8, "micro_batch": 2, "replica": 0, "replicas": 1}
    return byte_text.Sampler(text, **{**known, **fields})


def taken(source, count):
    return torch.cat([next(source)[0] for _ in range(count)])


def test_a_restored_position_continues_the_same_order_over_the_end_of_an_epoch(byte_text):
    whole = taken(sampler(byte_text), 40)  # 31 windows: more than two epochs
    for position in (0, 14, 30, 62):
        again = sampler(byte_text)
        taken(again, 3)
        again.position = position
        assert torch.equal(taken(again, 9), whole[position : position + 18])


def test_every_epoch_reads_each_window_once_in_an_order_of_its_own(byte_text):
    starts = taken(sampler(byte_text, micro_batch=1), 62)[:, 0].tolist()
    assert sorted(starts[:31]) == sorted(starts[31:]) == list(range(0, 248, 8))
    assert starts[:31] != starts[31:]


def test_replicas_share_the_samples_between_them(byte_text):
    alone = taken(sampler(byte_text), 4)
    first, second = (taken(sampler(byte_text, replica=replica, replicas=2), 2) for replica in (0, 1))
    assert torch.equal(torch.cat([first[:2], second[:2], first[2:], second[2:]]), alone)


def test_skipping_moves_as_far_as_reading(byte_text):
    read, skipped = sampler(byte_text), sampler(byte_text)
    taken(read, 5)
    skipped.skip(5)
    assert read.position == skipped.position
    assert torch.equal(taken(read, 2), taken(skipped, 2))


@pytest.mark.parametrize(("content", "complaint"), [(None, "no such file"), (b"", "is empty"), (b"short", "too few")])
def test_text_that_cannot_be_learnt_from_is_refused_by_name(byte_text, tmp_path, content, complaint):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        byte_text.Text.read(str(path)).split(0.05, 8)
    assert str(path) in str(caught.value)
