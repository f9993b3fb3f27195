"""A request is read whole or refused by name: no field is missing, of another type or out of range once it is used."""

from __future__ import annotations

from typing import Any

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
OF_RANK: dict[str, Any] = {"rank": 0, "token": 1}
SHAPES = {"nbytes": 100, "small_nbytes": 10, "buckets": 1, "layout": 5, "slots": 3}
LOCAL: list[dict[str, Any]] = [
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
    {"do": "settle", **OF_RANK, "world_size": 4, "spares": []},
    {"do": "checkpoint", "reason": "request", "seconds": 1.0, "only_due": False},
]  # fmt: skip
PEER: list[dict[str, Any]] = [
    {"do": "probe"},
    {"do": "spare", "node": "c", "world_size": 4},
    {"do": "release", "lineage": 3},
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
]
OPTIONAL = {"base"}


def test_every_request_of_this_node_is_in_the_sample() -> None:
    assert {message["do"] for message in LOCAL} | {"attach"} == set(requests.LOCAL)


@pytest.mark.parametrize("message", LOCAL, ids=lambda message: message["do"])
def test_a_request_of_this_node_without_one_of_its_fields_is_refused_by_that_name(message: dict[str, Any]) -> None:
    assert requests.local(message)
    for name in message.keys() - {"do"} - OPTIONAL:
        with pytest.raises(ProtocolError, match=f"{message['do']}: {name}: Field required"):
            requests.local({key: value for key, value in message.items() if key != name})


@pytest.mark.parametrize("message", PEER, ids=lambda message: f"{message['do']} {message.get('what', '')}")
def test_a_request_of_another_smp_without_one_of_its_fields_is_refused_by_that_name(message: dict[str, Any]) -> None:
    assert requests.peer(message)
    for name in message.keys() - {"do", "what"}:
        with pytest.raises(ProtocolError, match=f"{name}: Field required"):
            requests.peer({key: value for key, value in message.items() if key != name})


@pytest.mark.parametrize("value", [None, -1, 1.5, "1", True, [], {}, 1 << 64])
@pytest.mark.parametrize("message", [*LOCAL, *PEER], ids=lambda message: f"{message['do']} {message.get('what', '')}")
def test_what_is_not_of_its_type_is_this_project_s_error(message: dict[str, Any], value: object) -> None:
    for name in message.keys() - {"do", "what"}:
        for read in (requests.local, requests.peer):
            try:
                read({**message, name: value})
            except FtError as error:
                assert str(error).isprintable()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"do": "take", **{**PEER[5], "exponent": 255}}, "exponent"),
        ({**PEER[8], "nbytes": (1 << 20) + 1}, "nbytes"),
        ({**PEER[8], "version": [1]}, "version: .*expected a lineage and an iteration"),
        ({"do": "read", "what": "disk"}, "unknown read: 'disk'"),
        ({"do": ["take"]}, r"unknown request between SMPs: \['take'\]"),
        ({}, "unknown request between SMPs: None"),
    ],
)
def test_what_is_out_of_range_is_refused_with_its_reason(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        requests.peer(message)


def test_failure_domains_are_those_of_all_nodes_or_none() -> None:
    for domains in ([], ["x", ""]):
        assert Protection.read({**PROTECTION.block(), "domains": domains}).domains == tuple(domains)
    for domains in (["x"], ["x", "y", "z"], [1, 2], "xy"):
        with pytest.raises(ProtocolError):
            Protection.read({**PROTECTION.block(), "domains": domains})


def test_a_shape_names_its_fields_and_holds_no_more_parity_than_bytes() -> None:
    attach = {"do": "attach", **OF_RANK, "fingerprint": {"layers": (1, 2)}, "pid": 1, "fresh": False}
    fields = requests.local({**attach, "shape": {**SHAPES, **_others(SHAPES)}})
    assert fields.shape.nbytes == 100 and fields.fingerprint == {"layers": [1, 2]}, "as JSON gives it back"
    for shape in ({}, SHAPES | {"more": 1}, [1, 2], {**SHAPES, **_others(SHAPES), "parity_nbytes": 101}):
        with pytest.raises(ProtocolError, match="attach: shape"):
            requests.local({**attach, "shape": shape})
    with pytest.raises(ProtocolError, match="attach: fingerprint"):
        requests.local({**attach, "shape": {**SHAPES, **_others(SHAPES)}, "fingerprint": {"a": object()}})


def _others(shape: dict[str, int]) -> dict[str, int]:
    return {name: 0 for name in Shape.__dataclass_fields__ if name not in shape}
