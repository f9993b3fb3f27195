"""Flat views of tensors, and the copy of many pieces by one call."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_plugins.errors import InventoryError
from ft_plugins.snapshot.capture.copiers import HostCopier, copier_for, flat_bytes


def memory(tensor):
    """The storage bytes from the tensor's first element on, as long as the tensor is."""
    raw = bytes(tensor.untyped_storage().tolist())
    start = tensor.storage_offset() * tensor.element_size()
    return raw[start : start + tensor.numel() * tensor.element_size()]


@given(
    st.permutations(range(3)),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)
def test_a_dense_tensor_in_any_order_of_dimensions_is_taken_as_it_lies(order, shape, dtype):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype).permute(order)
    flat = flat_bytes("w", tensor)
    assert flat.dtype == torch.uint8 and bytes(flat.tolist()) == memory(tensor)
    assert flat.data_ptr() == tensor.data_ptr()


def test_a_channels_last_tensor_is_dense_and_writing_its_flat_view_writes_it():
    tensor = torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last)
    assert not tensor.is_contiguous()
    saved = flat_bytes("w", tensor).clone()
    expected = tensor.clone()
    tensor.zero_()
    flat_bytes("w", tensor).copy_(saved)
    assert torch.equal(tensor, expected)


def test_a_part_of_a_larger_buffer_is_taken_from_where_it_starts():
    buffer = torch.arange(100, dtype=torch.float32)
    part = buffer[10:34].view(4, 6)
    flat = flat_bytes("w", part)
    assert flat.numel() == 96 and torch.equal(flat.view(torch.float32), torch.arange(10.0, 34.0))


def test_scalar_tensors_and_empty_tensors_have_flat_views():
    assert flat_bytes("step", torch.tensor(3.0)).view(torch.float32).item() == 3.0
    assert flat_bytes("none", torch.empty(0, 5)).numel() == 0
    assert flat_bytes("one", torch.zeros(9)[::4][:1]).numel() == 4  # a stride of a size of one has no meaning


def test_a_parameter_that_requires_grad_can_be_taken_and_written():
    parameter = torch.nn.Parameter(torch.ones(3))
    flat_bytes("w", parameter).zero_()
    assert parameter.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4)[:, :2],
        torch.zeros(8)[::2],
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(6).as_strided((3, 3), (1, 1)),
    ],
    ids=["columns", "every other", "expanded", "overlapping"],
)
def test_a_tensor_with_gaps_or_overlaps_is_refused_by_name(tensor):
    with pytest.raises(InventoryError, match="item 'layers.0.weight'.*not dense"):
        flat_bytes("layers.0.weight", tensor)


def test_the_host_copier_has_put_every_piece_in_place_when_it_returns():
    sources = [torch.arange(n, dtype=torch.uint8) for n in (1, 64, 200, 0)]
    target = torch.zeros(300, dtype=torch.uint8)
    copier = copier_for(torch.device("cpu"))
    assert isinstance(copier, HostCopier)
    copier.ready()
    copier.copy([target[0:1], target[1:65], target[65:265], target[265:265]], sources)
    copier.close()
    assert torch.equal(target[:265], torch.cat(sources)) and not target[265:].any()


def test_a_device_that_cannot_be_captured_is_refused_by_name():
    with pytest.raises(InventoryError, match="meta"):
        copier_for(torch.device("meta"))


class _Scaled(torch.Tensor):
    """Stands for int8 values and their scale, as fp8 parameters do."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values):
        self.of = values

    @classmethod
    def __torch_dispatch__(cls, operation, types, given=(), named=None):
        if operation is torch.ops.aten.detach.default:
            return cls(given[0].of)
        return operation(*(one.of * 0.5 if isinstance(one, cls) else one for one in given), **(named or {}))


def test_a_tensor_that_stands_for_others_is_refused_by_name():
    """The bytes of a copy were captured, and restored into one: training went on with what it had."""
    parameter = torch.nn.Parameter(_Scaled(torch.ones(4, dtype=torch.int8)), requires_grad=False)
    with pytest.raises(InventoryError, match="item 'w' is a _Scaled, which stands for other tensors"):
        flat_bytes("w", parameter)
