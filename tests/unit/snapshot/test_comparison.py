"""Which items of a sealed slot differ from the live ones, in how many elements and by how much."""

import math

import pytest
import torch

from ft_plugins.model.inventory import Inventory, Item, Role
from ft_plugins.snapshot.capture.capture import Capture
from ft_plugins.snapshot.capture.layout import plan_layout
from ft_plugins.snapshot.segment.claims import CaptureOwner
from ft_plugins.snapshot.segment.segment import Segment, create
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import SlotState, Version


class Heard(CaptureOwner):
    def __init__(self):
        self.found = []

    def compared(self, found):
        self.found.append(dict(found))


def test_each_item_that_differs_is_named_with_how_many_elements_and_by_how_much(tmp_path):
    live = {
        "weights": torch.arange(5000, dtype=torch.float32),
        "half": torch.ones(33, dtype=torch.bfloat16),
        "counts": torch.arange(7),
        "frozen": torch.ones(40),
        "same": torch.ones(9),
        "odd": torch.ones(3),
    }
    items = tuple(
        Item(name, str(one.dtype)[6:], tuple(one.shape), one.numel() * one.element_size(), Role.PARAMETER, (0,))
        for name, one in live.items()
    )
    layout = plan_layout(Inventory.of(0, items), [], 4096)  # an item is in several buckets
    shape = Shape(layout.nbytes, 4096, len(layout.buckets), 1, 3, 0, 0, 3, 3)
    create(tmp_path / "segment", shape, 0, {})
    segment, heard = Segment(tmp_path / "segment"), Heard()
    segment.header.token = 1
    capture = Capture(segment, layout, lambda: live, 1, heard)
    version = Version(1, 5)
    capture.start(version, b"small")
    capture.wait()
    capture.compare(version)
    capture.wait()
    live["weights"][[3, 4000]] += torch.tensor([0.5, -2.0])
    live["half"][32] = 1.5
    live["counts"][1] = 4
    live["frozen"][0] = math.inf
    live["odd"][2] = 0.75
    slots = segment.slots()
    capture.compare(version)
    capture.wait()
    assert heard.found == [
        {},
        {
            "weights": (2, 2.0),
            "half": (1, 0.5),
            "counts": (1, 3.0),
            "frozen": (1, pytest.approx(math.nan, nan_ok=True)),
            "odd": (1, 0.25),
        },
    ]
    assert segment.slots() == slots and sum(one.state is SlotState.CLEAN for one in slots) == 1
    capture.close()
    segment.close()
