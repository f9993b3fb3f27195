"""Double capture from device memory: the same parity and digests as from the same bytes on the host."""

import os
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.snapshot.capture.capture import Capture
from ft_plugins.snapshot.capture.double import with_parity
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.segment.paths import path_of, remove
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import Version

pytestmark = pytest.mark.gpu

NODES = ("a", "b", "c")
RANKS = tuple(range(len(NODES)))
BUCKET = 1 << 20


def slot_of(stack, tensors, name):
    """Data and parity, and the digests of both, of the second of two versions that rank 1 captures, the first one of
    other bytes."""
    items = [
        Item(item, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.nbytes, Role.BUFFER, RANKS)
        for item, t in tensors.items()
    ]
    layout = with_parity(plan_layout(Inventory.of(1, items), NODES, BUCKET), NODES, [RANKS], 1, BUCKET)
    nbytes, parity = layout.nbytes + layout.parity_nbytes, layout.parity_nbytes
    assert parity > BUCKET
    path = path_of(name, "b", 1)
    create(path, Shape(nbytes, 100, len(layout.ranges), 1, 3, parity, layout.source_digest_count), 1, {})
    stack.callback(remove, name, "b")
    segment = Segment(path)
    stack.callback(segment.close)
    segment.ranges, segment.header.token = layout.ranges, 1
    capture = Capture(segment, layout, lambda: tensors, 1)
    stack.callback(capture.close)
    for iteration in (1, 2):
        for tensor in tensors.values():
            tensor.add_(iteration)
        segment.header.await_version(Version(1, iteration))
        capture.start(Version(1, iteration), b"")
        capture.wait()
    (slot,) = [slot for slot in segment.slots() if slot.version == Version(1, 2)]
    index = segment.parity_of(Version(1, 2))
    assert index is not None
    segment.verify(slot.index)
    segment.verify(index)
    data = np.concatenate([segment.data(slot.index), segment.data(index)])
    return data, np.concatenate([segment.digests(slot.index), segment.digests(index)])


def test_parity_of_device_memory_is_that_of_the_same_bytes_on_the_host():
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "main": torch.randn(3_000_001, generator=generator),
        "half": torch.randn(3, 100_001, generator=generator).bfloat16(),
        "transposed": torch.randn(640, 320, generator=generator).t(),
        "step": torch.randn(1, generator=generator).reshape(()),
    }
    on_device = {name: tensor.clone().cuda() for name, tensor in tensors.items()}
    on_device["step"] = tensors["step"].clone()  # as optimizers keep it: on the host, in the same bucket
    with ExitStack() as stack:
        host = slot_of(stack, {name: tensor.clone() for name, tensor in tensors.items()}, f"gpuh{os.getpid()}")
        device = slot_of(stack, on_device, f"gpud{os.getpid()}")
    assert (device[0] == host[0]).all() and (device[1] == host[1]).all()
