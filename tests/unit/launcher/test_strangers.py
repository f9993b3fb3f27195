"""What whoever can reach a node's port, and does not know the job's secret, can do there: nothing."""

import os
import resource
import select
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError

from ft_plugins.launcher import plugin
from ft_plugins.launcher.rendezvous import round_join
from ft_plugins.launcher.rendezvous.rendezvous import Rendezvous
from ft_plugins.rehearse.driver import free_port

WAIT = 90.0
JOB = "the-name-of-the-job"


@pytest.fixture
def node(tmp_path):
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
def test_a_process_that_has_the_port_of_the_endpoint_is_named_at_once(says, monkeypatch, capsys):
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


def goes_on(node):
    """The round is the same one, at the same node, and other nodes are answered."""
    node._node.server.check()
    assert node._node.server.is_serving and node._node.service.leading is not None
    node._next_look = 0.0
    assert node.num_nodes_waiting() == 0 and not node.is_closed()
    assert node._round == 1 and not node._node.service.present


@pytest.fixture
def few_descriptors():
    """Leaves this process so many descriptors beyond those that are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(count):
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


def test_silent_connections_leave_descriptors_for_workers(node, few_descriptors):
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
