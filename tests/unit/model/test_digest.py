"""State digests: one bit more or less shows, in every kind of value that small state may hold."""

import json
import struct

import numpy as np
import pytest
import torch

from ft_plugins.model.digest import readable, state_digest, tensor_digest
from harness.plain_host import PlainHost


def next_float(value):
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return float(struct.unpack("d", struct.pack("q", bits + 1))[0])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (0.1, next_float(0.1)),
        (0.0, -0.0),
        (1, 2**70),
        ("a", "b"),
        (b"a", b"b"),
        (tuple(range(100)), (*range(99), 7)),
        ([1, [2, 3]], [1, [2, 4]]),
        ({"a": 1}, {"a": 1.0}),
        (np.array([1.0, 2.0]), np.array([1.0, next_float(2.0)])),
        (np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.float32)),
        (np.float64(1.0), np.float64(next_float(1.0))),
        (torch.zeros(3), -torch.zeros(3)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (None, 0),
    ],
)
def test_what_differs_in_one_bit_reads_differently(left, right):
    assert json.dumps(readable(left)) != json.dumps(readable(right))
    assert json.dumps(readable(left)) == json.dumps(readable(left))


def test_a_tensor_is_its_bytes_in_order_whatever_its_memory_looks_like():
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous()) != tensor_digest(tensor)
    assert "values" not in tensor_digest(tensor)
    assert tensor_digest(torch.tensor([0.5]))["values"] == [(0.5).hex()]


def test_a_state_is_all_its_items_and_its_small_state():
    weight = torch.ones(5)
    host = PlainHost({"weight": weight}, get_state=lambda: {"step": 3})
    before = state_digest(host)
    assert list(before["items"]) == ["weight"] and before["small"]["caller"] == {"step": 3}
    weight[4] += 1e-6
    after = state_digest(host)
    assert after["items"] != before["items"] and after["small"] == before["small"]
