"""Whole jobs where people run them: in a container's namespaces, with little shared memory, among hostile strangers.

Each is rehearsed on two emulated nodes: a node is lost, then a rank is killed, and every iteration is compared.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SECONDS = 900.0  # a bound for a job that hangs
NETWORK = "127.77.1."  # of the emulated nodes
SILENT = 300  # connections that are held open
NAMESPACES = {
    "processes": ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
    "48-MiB": ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=48m ftp-test /dev/shm && exec "$@"', "sh"),
}


def rehearsed(folder, *around):
    """The outcome of a rehearsal by the command `around` it."""
    tool = str(Path(sys.executable).with_name("ft-plugins"))
    options = ["--json", "--out", str(folder), "--nodes", "2", "--iterations", "40", "--kill", "20,21"]
    job = ["ft-run", "--nproc-per-node", "2", "--ftp-preload", "off", "--reft", "launch/examples/torch_loop.py"]
    done = subprocess.run(
        [*around, tool, "rehearse", *options, "--", *job, "--iterations", "40"],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    return outcome


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_job_in_namespaces_of_its_own_survives_a_lost_node_and_a_killed_rank(tmp_path, name):
    words = NAMESPACES[name]
    tried = None if os.geteuid() or shutil.which("unshare") is None else [*words, "true"]
    if tried is None or subprocess.run(tried, capture_output=True, timeout=300, check=False).returncode:
        pytest.skip("namespaces need root")
    outcome = rehearsed(tmp_path, *words)
    assert outcome["exact"], outcome
    assert len(outcome["comparison"]["restored"]) == 2


def test_a_job_that_strangers_flood_survives_a_lost_node_and_a_killed_rank(tmp_path):
    with flood() as counted:
        outcome = rehearsed(tmp_path)
    assert outcome["exact"], outcome
    assert len(outcome["comparison"]["restored"]) == 2
    assert counted["ports"] >= 4 and counted["connections"] > 1000, counted


@contextmanager
def flood():
    """Connect to every port on which the emulated nodes listen: send bytes of any kind, or nothing at all."""
    stop, counted = threading.Event(), {"ports": 0, "connections": 0}
    thread = threading.Thread(target=_flood, args=(stop, counted), daemon=True)
    thread.start()
    try:
        yield counted
    finally:
        stop.set()
        thread.join(60)


def _flood(stop, counted):
    rng, silent, seen = random.Random(7), deque[socket.socket](), set[tuple[str, int]]()
    while not stop.wait(0.05):
        listening = [c.laddr for c in psutil.net_connections("tcp4") if c.status == psutil.CONN_LISTEN]
        places = [(str(at.ip), int(at.port)) for at in listening if at.ip.startswith(NETWORK)]
        for place in places * 5:
            try:
                connection = socket.create_connection(place, 1)
                kind = rng.randrange(4)
                if kind:
                    size = (rng.getrandbits(32) if kind == 1 else rng.randrange(1, 256)).to_bytes(4, "big")
                    connection.sendall((b"" if kind == 3 else size) + rng.randbytes(rng.randrange(1, 4096)))
                    connection.close()
                else:
                    silent.append(connection)
                    if len(silent) > SILENT:
                        silent.popleft().close()
            except OSError:  # it has been lost, or has hung up
                continue
            seen.add(place)
            counted["connections"] += 1
        counted["ports"] = len(seen)
    for connection in silent:
        connection.close()
