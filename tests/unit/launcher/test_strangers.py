"""What whoever can reach a node's port, and does not know the job's secret, can do there: nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError

from ft_plugins.launcher import job_secret, plugin
from ft_plugins.launcher.rendezvous import peer_client, peer_server, round_join
from ft_plugins.launcher.rendezvous.peer_client import Credentials
from ft_plugins.launcher.rendezvous.rendezvous import Rendezvous
from ft_plugins.rehearse.ports import free_port

WAIT = 20.0
JOB = "the-name-of-the-job"


def frame(message: Any) -> bytes:
    payload = msgpack.packb(message, use_bin_type=True)
    return struct.pack(">I", len(payload)) + payload


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Rendezvous]:
    """A node whose round is complete, and could be larger."""
    parameters = RendezvousParameters(
        "ft_plugins",
        f"127.0.0.1:{free_port()}",
        JOB,
        1,
        2,
        node_name="n",
        last_call_timeout=0,
        wait_seconds=0,
        detect_seconds=2,
        run_dir=tmp_path,
    )
    found = plugin.create(parameters)
    assert isinstance(found, Rendezvous)
    assert found.next_rendezvous().world_size == 1
    yield found
    found.shutdown()


SILENT_OR_RUDE = """
import socket, sys
server, kept = socket.create_server(("127.0.0.1", 0)), []
print(server.getsockname()[1], flush=True)
while True:
    kept.append(server.accept()[0])
    if sys.argv[1]:
        kept[-1].sendall(sys.argv[1].encode())
"""


@pytest.mark.parametrize("says", ["", "HTTP/1.0 400 Bad Request"], ids=["silent", "rude"])
def test_a_process_that_has_the_port_of_the_endpoint_is_named_at_once(
    says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(round_join, "_TAKEN_SECONDS", 0.0)
    stranger = subprocess.Popen([sys.executable, "-c", SILENT_OR_RUDE, says], stdout=subprocess.PIPE)
    try:
        assert stranger.stdout and select.select([stranger.stdout], [], [], WAIT)[0]
        endpoint = f"127.0.0.1:{int(stranger.stdout.readline())}"
        times = {"join_timeout": 3, "wait_seconds": 0, "last_call_timeout": 0, "detect_seconds": 2}
        handler = plugin.create(RendezvousParameters("ft_plugins", endpoint, JOB, 2, 2, node_name="n", **times))
        with pytest.raises(RendezvousTimeoutError, match=f"process {stranger.pid} .*end it"):
            handler.next_rendezvous()
        handler.shutdown()
    finally:
        stranger.kill()
        stranger.communicate(timeout=WAIT)
    [line] = capsys.readouterr().err.splitlines()
    named = f"ft-run: --rdzv-endpoint {endpoint}: process {stranger.pid} ({sys.executable} -c "
    assert line.startswith(named) and "or choose another port on all nodes (this node goes on" in line


def call(node: Rendezvous) -> socket.socket:
    return socket.create_connection(("127.0.0.1", node._node.server.port), WAIT)


def heard(node: Rendezvous, *messages: Any) -> bytes:
    """All that is answered to these frames, until the connection ends or nothing comes any more."""
    found = b""
    with call(node) as connection:
        connection.settimeout(1.0)
        with contextlib.suppress(OSError):  # it hangs up at once
            for message in messages:
                connection.sendall(frame(message))
            while part := connection.recv(1 << 16):
                found += part
    return found


def goes_on(node: Rendezvous) -> None:
    """The round is the same one, at the same node, and other nodes are answered."""
    node._node.server.check()
    assert node._node.server.is_serving and node._node.service.leading is not None
    node._next_look = 0.0
    assert node.num_nodes_waiting() == 0 and not node.is_closed()
    assert node._round == 1 and not node._node.service.present


LEAD = {"node": "x", "token": "t", "endpoint": "127.0.0.1:1", "generation": 5}
APPLICATION = {"node": "0", "token": "t", "endpoint": "127.0.0.1:1"}


@pytest.mark.parametrize(
    "messages",
    [
        [{"do": "meet", "run": JOB, "lead": nested(1010)}],
        [{"do": "apply", "run": JOB, "token": "t", "application": {**APPLICATION, "knows": 2**64 - 1}}],
        [
            {
                "do": "apply",
                "run": JOB,
                "token": "t",
                "application": {**APPLICATION, "seat": {"round": 2**32 - 1, "rank": 0, "size": 1}},
            },
            *[{"do": "look", "run": JOB, "token": "t", "round": 0}] * 5,
        ],
        [{"do": "apply", "run": JOB, "token": "t", "application": APPLICATION}],
        [{"do": "close", "run": JOB, "reason": "a stranger says so", "status": "failed"}],
        [{"do": "elect", "run": JOB, "lead": {**LEAD, "generation": 2**31}}],
        [{"do": "meet", "run": "?"}, {"do": "meet", "run": "?", "lead": LEAD}],
        [nested(100)],
        [{"purpose": "rendezvous", "job": nested(500), "node": 1, "nonce": b"", "encrypt": {}}],
    ],
    ids=["nested", "overflow", "seat", "join", "close", "elect", "name", "list", "hello"],
)
def test_a_stranger_changes_and_learns_nothing(node: Rendezvous, tmp_path: Path, messages: list[Any]) -> None:
    before = (tmp_path / "nodes.json").read_bytes()
    found = heard(node, *messages)
    time.sleep(0.3)  # a few steps of the round
    goes_on(node)
    assert len(found) < 64 and JOB.encode() not in found
    assert (tmp_path / "nodes.json").read_bytes() == before
    assert json.loads(before)["roster"]["round"] == 1


def test_a_stranger_does_not_learn_whether_it_guessed_the_name_of_the_job(node: Rendezvous) -> None:
    replies = []
    for job in (JOB, "?" * len(JOB)):
        hello = {"purpose": "rendezvous", "job": job, "node": "x", "nonce": bytes(32), "encrypt": False}
        reply = heard(node, hello, {"proof": bytes(32)})
        replies.append((len(reply), msgpack.unpackb(reply[4:]).keys()))
    assert replies[0] == replies[1] and replies[0][1] == {"node", "nonce", "encrypt", "proof"}
    goes_on(node)


def test_a_peer_that_asks_and_does_not_read_costs_no_memory(node: Rendezvous) -> None:
    long = {**LEAD, "node": "x" * 900_000}
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(call(node)) for _ in range(3)]
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(frame({"do": "meet", "run": JOB, "lead": long}))
                for _ in range(200):
                    peer.sendall(frame({"do": "meet", "run": JOB}))
        deadline = time.monotonic() + 2
        most = before
        while time.monotonic() < deadline:
            most = max(most, process.memory_info().rss)
            time.sleep(0.05)
    assert most - before < 32 << 20, f"{(most - before) >> 20} MiB"
    goes_on(node)


def test_silent_connections_of_many_addresses_take_all_places_and_keep_no_node_out(
    node: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "_PROOF_SECONDS", 600.0)
    server = node._node.server
    server._places = 40
    us = Credentials(job_secret.user_secret(), JOB, "x")
    with contextlib.ExitStack() as stack:
        for number in range(120):
            one = stack.enter_context(socket.socket())
            one.bind((f"127.0.1.{1 + number // 4}", 0))
            one.connect(("127.0.0.1", server.port))
        deadline = time.monotonic() + WAIT
        while len(server._unproven) < 30:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert peer_client.ask(node._node.me.endpoint, {"do": "meet"}, WAIT, us)["node"] == "n"
        goes_on(node)


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Leaves this process so many descriptors beyond those that are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(count: int) -> None:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


SILENT = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
found = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20) for _ in range(1100)]
print("connected", flush=True)
sys.stdin.read()
"""


def test_silent_connections_leave_descriptors_for_workers(
    node: Rendezvous, few_descriptors: Callable[[int], None]
) -> None:
    few_descriptors(200)
    command = ["python3", "-c", SILENT, str(node._node.server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None and stranger.stdin is not None
        try:
            assert select.select([stranger.stdout], [], [], WAIT)[0] and stranger.stdout.readline() == b"connected\n"
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:  # all of them are accepted, or refused
                time.sleep(0.1)
                assert subprocess.run(["true"], timeout=WAIT).returncode == 0  # as a worker is started
            goes_on(node)
        finally:
            stranger.stdin.close()
            stranger.wait(WAIT)
