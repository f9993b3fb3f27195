"""Small state: what goes in comes out, types included; what cannot is refused by the name of its place."""

import collections
import dataclasses
import enum
import math
import random

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ft_plugins.errors import InventoryError, ProtocolError
from ft_plugins.snapshot.capture.codec import decode, encode


class Colour(enum.Enum):
    RED = "r"


class Order(enum.IntEnum):
    FIRST = 1


DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
NUMPY = ("<f4", "<f8", ">f8", "<f2", "<i8", "<i4", "|i1", "|u1", "<u4", "<u8", "|b1", "<c8", "<M8[s]")


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(left, right):
    """Equal with the same types all the way down; NaN equals NaN, tensors and arrays bit for bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) and (left == right or left != left and right != right)
    return bool(left == right)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    if dtype is torch.bool:
        raw = bytes(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
    else:
        raw = draw(st.binary(min_size=size, max_size=size))
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


arrays = st.sampled_from(NUMPY).flatmap(
    lambda kind: hnp.arrays(np.dtype(kind), hnp.array_shapes(min_dims=0, min_side=0))
)
scalars = arrays.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
leaves = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.binary()
    | arrays | scalars | tensors()
)  # fmt: skip
plain_keys = st.text() | st.integers() | st.booleans() | st.none() | st.binary()
keys = plain_keys | st.tuples(plain_keys, plain_keys)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, st.integers(), max_size=4).map(collections.Counter)
        | st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(lambda parts: collections.defaultdict(list, parts))
        | st.tuples(inner, inner).map(lambda parts: Pair(*parts))
        | st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(states)
def test_every_state_of_listed_types_comes_back_with_the_same_types_and_bits(state):
    assert same(decode(encode(state)), state)


def test_the_random_states_of_python_numpy_and_torch_come_back_and_continue_the_same_sequences():
    python, legacy = random.Random(7), np.random.RandomState(7)
    generator = np.random.Generator(np.random.PCG64(7))  # holds integers of 128 bits
    device = torch.Generator().manual_seed(7)
    state = {
        "python": python.getstate(),
        "numpy": legacy.get_state(),
        "pcg": generator.bit_generator.state,
        "torch": device.get_state(),
    }
    expected = (python.random(), legacy.rand(), generator.random(), torch.rand(1, generator=device).item())

    restored = decode(encode(state))

    assert isinstance(restored["python"], tuple) and isinstance(restored["python"][1], tuple)
    python.setstate(restored["python"])
    legacy.set_state(restored["numpy"])
    generator.bit_generator.state = restored["pcg"]
    device.set_state(restored["torch"])
    assert (python.random(), legacy.rand(), generator.random(), torch.rand(1, generator=device).item()) == expected


def test_restored_arrays_and_tensors_can_be_written():
    restored = decode(encode({"array": np.arange(3), "tensor": torch.arange(3)}))
    restored["array"] += 1
    restored["tensor"] += 1
    assert restored["array"].tolist() == restored["tensor"].tolist() == [1, 2, 3]


def test_a_transposed_array_and_a_strided_tensor_come_back_with_their_elements_in_place():
    array, tensor = np.arange(6).reshape(2, 3).T, torch.arange(24).reshape(4, 6)[::2, 1::2]
    restored = decode(encode([array, tensor]))
    assert np.array_equal(restored[0], array) and torch.equal(restored[1], tensor)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, frozenset(), 1j, bytearray(b"x"), range(3), Colour, Colour.RED, Order.FIRST, len,
     np.array([object()]),
     np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), np.zeros(1, dtype=[("a", "i4")])[0]],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_type_that_is_not_on_the_list_is_an_error_that_names_its_place(value):
    with pytest.raises(InventoryError, match=r"state\['optimizer'\]\[1\]\['x'\]"):
        encode({"optimizer": [0, {"x": value}]})


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Real(float):
    pass


Pair = collections.namedtuple("Pair", "left right")


class Named(Pair):  # a subclass of a named tuple, with attributes
    pass


class Sorted(collections.OrderedDict[str, int]):
    pass


@pytest.mark.parametrize(
    "value",
    [Text("a"), Number(3), Real(1.5), np.str_("a"), np.bytes_(b"a"), Named(1, 2), Sorted(a=1),
     collections.namedtuple("Hidden", "left right")(1, 2),  # no name leads to its class
     collections.defaultdict(lambda: 3), torch.nn.Parameter(torch.zeros(1)), np.ma.array([1], mask=[True])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_subclass_is_refused_by_place_rather_than_turned_into_its_base(value):
    """What came back would not be what went in: a dict without its methods, a default dict without its default."""
    with pytest.raises(InventoryError, match=r"state\['a'\]"):
        encode({"a": value})


def test_what_a_module_returns_as_its_state_is_loaded_as_if_it_had_not_been_captured():
    """The versions of its parts are an attribute of that mapping."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    restored = decode(encode(state))
    assert type(restored) is collections.OrderedDict and same(restored, state)
    assert restored._metadata == state._metadata and restored._metadata["0"] == {"version": 2}


def test_a_default_comes_back_and_a_named_tuple_has_its_names():
    restored = decode(encode({"seen": collections.defaultdict(int, {"a": 3}), "best": Pair(0.5, [1])}))
    restored["seen"]["b"] += 1
    assert restored["seen"] == {"a": 3, "b": 1} and restored["best"].left == 0.5


@dataclasses.dataclass
class Best:
    loss: float
    steps: list[int]

    def __post_init__(self):
        self.steps.append(-1)  # not again, where it is decoded


def test_a_deque_keeps_its_length_and_a_dataclass_its_class(monkeypatch):
    best = Best(0.5, [1])
    encoded = encode([collections.deque([1, (2,)], maxlen=3), best])
    window, restored = decode(encoded)
    assert window == collections.deque([1, (2,)]) and window.maxlen == 3
    assert type(restored) is Best and restored == best and restored.steps == [1, -1]
    monkeypatch.setitem(globals(), "Best", dataclasses.make_dataclass("Best", ["loss"]))
    with pytest.raises(ProtocolError, match="test_codec.Best, which the program does not have with these fields"):
        decode(encoded)


def test_a_dataclass_that_keeps_more_than_its_fields_is_an_error():
    best = Best(0.5, [1])
    best.more = 1
    with pytest.raises(InventoryError, match="Best cannot be captured as small state"):
        encode(best)


def test_a_named_tuple_that_the_program_no_longer_has_is_an_error(monkeypatch):
    encoded = encode(Pair(1, 2))
    monkeypatch.setitem(globals(), "Pair", collections.namedtuple("Pair", "left middle right"))
    with pytest.raises(ProtocolError, match="test_codec.Pair, which the program does not have with these fields"):
        decode(encoded)


def test_what_cannot_be_captured_of_an_attribute_is_named():
    ordered = collections.OrderedDict(a=1)
    ordered.owner = [object()]
    with pytest.raises(InventoryError, match=r"state\['ema'\]\.owner\[0\]: a builtins.object cannot"):
        encode({"ema": ordered})


@pytest.mark.parametrize("key", [Text("a"), 2**70, np.int64(3), 1.5, ("a", 1), b"k", None, True])
def test_a_key_of_any_kind_comes_back_as_it_was_or_is_refused_by_place(key):
    try:
        encoded = encode({"outer": {key: 1}})
    except InventoryError as error:
        assert "state['outer']" in str(error)
        assert isinstance(key, Text)
    else:
        assert same(decode(encoded), {"outer": {key: 1}})


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b"", lambda b: b"\xc1" + b])
def test_bytes_that_are_no_encoding_are_a_protocol_error_that_tells_their_length(damage):
    damaged = damage(encode({"rng": torch.arange(5), "step": (1, 2)}))
    with pytest.raises(ProtocolError, match=f"{len(damaged)} bytes"):
        decode(damaged)


def test_an_extension_of_unknown_kind_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="unknown kind 77"):
        decode(msgpack.packb(msgpack.ExtType(77, msgpack.packb(1))))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_either_decode_or_are_a_protocol_error(encoded):
    try:
        decode(encoded)
    except ProtocolError as error:
        assert str(error)
