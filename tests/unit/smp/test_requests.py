"""A request is read whole or refused by name: no field is missing, of another type or out of range once it is used."""

import itertools

import pytest

from ft_plugins.errors import FtError, ProtocolError
from ft_plugins.smp.serve import requests
from ft_plugins.smp.serve.job_file import refer
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment.shape import Shape

SHAPE = Shape(100_000, 1000, 1, 77, 5)
PROTECTION = Protection(
    1, None, ("a", "b"), ((0, 1),), (SHAPE, SHAPE), 1, 0, (("127.0.0.1", 1), ("127.0.0.1", 2)), 1, 0.0, 5.0
)
REFERENCE, _ = refer(PROTECTION)
OF_RANK = {"rank": 0, "token": 1}
SHAPES = {"nbytes": 100, "small_nbytes": 10, "buckets": 1, "layout": 5, "slots": 3}
LOCAL = [
    {"do": "status"},
    {"do": "watch", "pid": 7, "detect_seconds": 5.0},
    {"do": "fence"},
    {"do": "restore", **OF_RANK, "lineage": 1, "base": [1, 2]},
    {"do": "shutdown", **OF_RANK},
    {"do": "end"},
    {"do": "endpoint", "address": "127.0.0.1", "secret_file": "/secret", "encrypt": False},
    {"do": "claim", **OF_RANK, "protection": REFERENCE.block()},
    {"do": "protect", **OF_RANK, "protection": REFERENCE.block()},
    {"do": "inventory"},
    {"do": "rebuild", **OF_RANK, "version": [1, 2], "protection": REFERENCE.block(), "holders": [[1, "127.0.0.1", 9]],
     "lost": [0]},
    {"do": "resize", **OF_RANK, "world_size": 4},
    {"do": "previous_sizes"},
    {"do": "spare", **OF_RANK, "world_size": 4, "node": "c", "where": ["127.0.0.1", 9], "seconds": 1.0},
    {"do": "settle", **OF_RANK, "world_size": 4},
    {"do": "checkpoint", "reason": "request", "seconds": 1.0, "only_due": False},
    {"do": "hold", "value": 1},
    {"do": "nodes", "first": 0, "each": 1.0, "every": 2.0},
]  # fmt: skip
PEER = [
    {"do": "probe"},
    {"do": "spare", "node": "c", "world_size": 4},
    {"do": "join", "epoch": 1, "position": 3},
    {"do": "begin", "epoch": 1, "version": [1, 2], "nodes": [[0, 1]], "ranks": [3]},
    {"do": "take", "epoch": 1, "version": [1, 2], "key": [0, 1, 0], "node": 1, "at": 0, "exponent": 3},
    {"do": "copy", "epoch": 1, "version": [1, 2], "rank": 1, "at": 0, "total": 10},
    {"do": "check", "epoch": 1, "version": [1, 2]},
    {"do": "read", "what": "data", "version": [1, 2], "rank": 1, "at": 0, "nbytes": 10},
    {"do": "read", "what": "parity", "version": [1, 2], "key": [0, 1, 0], "at": 0, "nbytes": 10},
    {"do": "read", "what": "copy", "version": [1, 2], "rank": 1, "offset": 0},
    {"do": "read", "what": "slot", "version": [1, 2], "rank": 1, "offset": 0},
    {"do": "read", "what": "job", "job": REFERENCE.job, "offset": 0},
    {"do": "status"},
]
OPTIONAL = {"base"}
STRANGE = [None, -1, 1.5, "1", True, [], {}, 1 << 64]


def test_every_request_of_this_node_is_in_the_sample():
    assert {message["do"] for message in LOCAL} | {"attach"} == set(requests.LOCAL)


@pytest.mark.parametrize("read", [requests.local, requests.peer])
def test_a_request_without_one_of_its_fields_or_with_one_of_another_type_is_refused_by_that_name(read):
    for message in LOCAL if read is requests.local else PEER:
        assert read(message)
        for name in message.keys() - {"do", "what"} - OPTIONAL:
            with pytest.raises(ProtocolError, match=f"{message.get('what', message['do'])}: {name}: Field required"):
                read({key: value for key, value in message.items() if key != name})
        for name, value in itertools.product(message.keys() - {"do", "what"}, STRANGE):
            try:
                read({**message, name: value})
            except FtError as error:
                assert str(error).isprintable()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("", {}), ("", {"do": None}), ("", {"do": ["status"]}), ("", {"do": {"a": 1}}), ("", {"do": "_attach"}),
        ("", {"do": "finish"}), ("", {"do": "watch"}),
        *(("restore", {"token": value}) for value in (True, "0", None)),
        *(("restore", {"rank": value}) for value in ("0", -5, 2**63)),
        *(("restore", {"base": value}) for value in (5, [1], ["a", "b"], [1, -2])),
        *(("restore", {"lineage": value}) for value in (-1, 2**64 - 1)),
        ("watch", {"pid": -1}), ("watch", {"detect_seconds": "long"}), ("checkpoint", {"only_due": 1}),
    ],
)  # fmt: skip
def test_a_request_of_this_node_with_strange_fields_is_refused(name, change):
    (sound,) = [message for message in LOCAL if message["do"] == name] or [{}]
    with pytest.raises(ProtocolError):
        requests.local({**sound, **change})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"do": "take", **{**PEER[4], "exponent": 255}}, "exponent"),
        ({**PEER[7], "nbytes": (1 << 20) + 1}, "nbytes"),
        ({**PEER[7], "version": [1]}, "version: .*expected a lineage and an iteration"),
        ({"do": "read", "what": "disk"}, "unknown read: 'disk'"),
        ({"do": ["take"]}, r"unknown request between SMPs: \['take'\]"),
        ({}, "unknown request between SMPs: None"),
    ],
)
def test_what_is_out_of_range_is_refused_with_its_reason(message, reason):
    with pytest.raises(ProtocolError, match=reason):
        requests.peer(message)


def test_failure_domains_are_those_of_all_nodes_or_none():
    for domains in ([], ["x", ""]):
        assert Protection.read({**PROTECTION.block(), "domains": domains}).domains == tuple(domains)
    for domains in (["x"], ["x", "y", "z"], [1, 2], "xy"):
        with pytest.raises(ProtocolError):
            Protection.read({**PROTECTION.block(), "domains": domains})


def test_a_shape_names_its_fields_and_holds_no_more_parity_than_bytes():
    attach = {"do": "attach", **OF_RANK, "fingerprint": {"layers": (1, 2)}, "pid": 1, "fresh": False}
    fields = requests.local({**attach, "shape": {**SHAPES, **_others(SHAPES)}})
    assert fields.shape.nbytes == 100 and fields.fingerprint == {"layers": [1, 2]}, "as JSON gives it back"
    whole = {**SHAPES, **_others(SHAPES)}
    wrong = [{**whole, **more} for more in ({"parity_nbytes": 101}, {"nbytes": -1}, {"nbytes": 2.0}, {"layout": True})]
    for shape in ({}, SHAPES | {"more": 1}, [1, 2], whole | {"more": 1}, *wrong):
        with pytest.raises(ProtocolError, match="attach: shape"):
            requests.local({**attach, "shape": shape})
    for fingerprint in ({"a": object()}, {"x": b"raw"}, []):
        with pytest.raises(ProtocolError, match="attach: fingerprint"):
            requests.local({**attach, "shape": whole, "fingerprint": fingerprint})


def _others(shape):
    return {name: 0 for name in Shape.__dataclass_fields__ if name not in shape}
