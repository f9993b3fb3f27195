"""Metrics over HTTP, from a real SMP: what is served, what is refused, and that nothing waits for a scrape."""

import http.client
import math
import os
import socket
import threading

import pytest

from ft_plugins.events import Event, Events, catalogue, file_sink
from ft_plugins.smp.serve import metrics_endpoint
from ft_plugins.smp.serve.metrics_endpoint import MetricsEndpoint
from ft_plugins.smp.serve.process import SnapshotProcess
from harness.job_control import wait_until

OWN = "127.0.0.1"
SECONDS = 60.0


def get(port, path="/metrics", method="GET"):
    connection = http.client.HTTPConnection(OWN, port, timeout=SECONDS)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def until_served(port, slow=None):
    def served():
        for each in slow or ():
            drip(each)
        try:
            return get(port)[0] == 200
        except (OSError, http.client.HTTPException):  # no room yet
            return False

    wait_until(served, SECONDS, lambda: "no scrape is answered")


def free_port():
    with socket.create_server((OWN, 0)) as found:
        return int(found.getsockname()[1])


class Emitted(list[Event]):
    """Events of a sink."""


@pytest.fixture
def emitted():
    return Emitted()


@pytest.fixture
def daemon(job, tmp_path, emitted):
    events = Events()
    events.subscribe(emitted.append)
    found = SnapshotProcess(tmp_path, job, "n", events)
    yield found
    if not found.ended.is_set():
        found.finish_alone("test")


def watch(daemon, port):
    place = {} if port is None else {"metrics": [OWN, port]}
    return daemon.answer({"do": "watch", "pid": os.getpid(), "detect_seconds": 600.0, **place})


def refused(port):
    with pytest.raises(ConnectionRefusedError):
        get(port)
    return True


def test_an_smp_serves_what_it_knows_while_ft_run_asks_for_it_and_nothing_otherwise(daemon, tmp_path):
    port, other = free_port(), free_port()
    assert watch(daemon, None)["ok"] and refused(port)
    assert watch(daemon, port)["ok"]
    events = Events("n", 0)
    events.subscribe(file_sink(tmp_path / "events.jsonl"))
    events.emit(catalogue.FENCE_WAITED, iteration=3, seconds=0.25)
    status, text = get(port)
    where = f'ftp_job="{tmp_path.parent.name}",node="{tmp_path.name}"'
    assert status == 200 and f"ftp_smp_answered{{{where}}} 1\n" in text
    assert f'ftp_fence_wait_seconds_total{{{where},rank="0"}} 0.25\n' in text
    assert watch(daemon, port)["ok"] and get(port)[0] == 200, "the same again"
    assert watch(daemon, other)["ok"] and get(other)[0] == 200 and refused(port)
    daemon.finish_alone("test")
    assert refused(other)


def test_only_the_metrics_can_be_read_and_nothing_can_be_changed(daemon):
    watch(daemon, port := free_port())
    assert get(port, "/")[0] == 404 and get(port, "/../token")[0] == 404
    assert [get(port, method=name)[0] for name in ("POST", "PUT", "DELETE")] == [501, 501, 501]


def test_a_port_that_is_taken_costs_the_metrics_alone_and_is_said(daemon, emitted):
    with socket.create_server((OWN, 0)) as other:
        port = int(other.getsockname()[1])
        reply = watch(daemon, port)
        assert reply["ok"], "the job is not disturbed"
        (event,) = [each for each in emitted if each.type is catalogue.METRICS_FAILED]
        assert event.fields["reason"] == f"{OWN}, port {port}: Address already in use"
        assert daemon.answer({"do": "status"})["metrics_error"] == reply["metrics_error"] == event.fields["reason"]
        daemon._touched = -math.inf
        daemon.touch()
        assert [each.type for each in emitted].count(catalogue.METRICS_FAILED) == 1, "once for each reason"
    daemon._touched = -math.inf
    daemon.touch()
    assert get(port)[0] == 200, "it tries again by itself"
    assert not daemon.answer({"do": "status"})["metrics_error"]


def test_a_scrape_while_the_smp_is_busy_says_so_and_leaves_out_what_it_would_have_to_wait_for(daemon, monkeypatch):
    monkeypatch.setattr("ft_plugins.smp.serve.owner._SCRAPE_SECONDS", 0.1)
    watch(daemon, port := free_port())
    with daemon._lock:
        status, text = get(port)
    assert status == 200 and "ftp_smp_answered{" in text and "ftp_world_size" not in text
    assert [line[-2:] for line in text.splitlines() if line.startswith("ftp_smp_answered")] == [" 0"]
    assert "ftp_world_size" in get(port)[1]


def test_silent_connections_keep_no_request_of_the_smp_waiting_and_are_closed(daemon, monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "_SECONDS", 0.3)
    watch(daemon, port := free_port())
    silent = [socket.create_connection((OWN, port), source_address=(f"127.0.0.{n}", 0)) for n in range(2, 22)]
    assert daemon.answer({"do": "status"})["ok"]
    until_served(port)
    for each in silent:
        each.close()


def drip(connection):
    """Whether a client that sends its request byte by byte is still listened to."""
    try:
        connection.sendall(b"G")
        connection.setblocking(False)
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.setblocking(True)


@pytest.mark.parametrize("peer", [OWN, "127.0.0.2"], ids=["of-the-same-address", "of-another-address"])
def test_connections_that_send_slowly_keep_no_scrape_out(daemon, monkeypatch, peer):
    monkeypatch.setattr(metrics_endpoint, "_SECONDS", math.inf)
    watch(daemon, port := free_port())
    slow = [socket.create_connection((OWN, port), source_address=(peer, 0)) for _ in range(20)]
    until_served(port, slow)
    for each in slow:
        each.close()


def test_a_burst_of_one_peer_keeps_no_scrape_out_also_if_it_comes_before_a_thread_has_run(daemon, monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "_SECONDS", math.inf)
    came, go_on = threading.Semaphore(0), threading.Event()
    serve = metrics_endpoint._Server.process_request_thread

    def late(server, request, client_address):
        came.release()
        assert go_on.wait(SECONDS)
        serve(server, request, client_address)

    monkeypatch.setattr(metrics_endpoint._Server, "process_request_thread", late)
    watch(daemon, port := free_port())
    burst = [socket.create_connection((OWN, port), source_address=("127.0.0.2", 0)) for _ in range(8)]
    try:
        assert all(came.acquire(timeout=SECONDS) for _ in burst)
        go_on.set()
        until_served(port)
    finally:
        go_on.set()
        for each in burst:
            each.close()


def test_a_request_has_a_bounded_time_however_its_bytes_arrive(daemon, monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "_SECONDS", 0.5)
    watch(daemon, port := free_port())
    with socket.create_connection((OWN, port)) as slow:
        wait_until(lambda: not drip(slow), SECONDS, lambda: "it is listened to for ever")
    assert get(port)[0] == 200


def test_of_two_scrapes_at_once_the_second_does_not_wait_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "LOCK_SECONDS", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def status():
        begun.set()
        assert go_on.wait(SECONDS)

    endpoint = MetricsEndpoint(tmp_path, status, Events())
    endpoint.become((OWN, free_port()))
    port = endpoint.port
    assert port is not None
    try:
        first = []
        thread = threading.Thread(target=lambda: first.append(get(port)[0]))
        thread.start()
        assert begun.wait(SECONDS) and get(port)[0] == 503
        go_on.set()
        thread.join(SECONDS)
        assert first == [200]
    finally:
        go_on.set()
        endpoint.close()


def test_a_node_without_room_for_a_thread_loses_the_metrics_and_not_the_request(tmp_path, monkeypatch):
    def full(thread):
        raise RuntimeError("can't start new thread")

    events, emitted = Events("n"), Emitted()
    events.subscribe(emitted.append)
    endpoint = MetricsEndpoint(tmp_path, lambda: None, events)
    place = (OWN, free_port())
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", full)
        endpoint.become(place)
    assert endpoint.port is None and [event.type for event in emitted] == [catalogue.METRICS_FAILED]
    endpoint.become(place)
    try:
        assert endpoint.port == place[1], "the port was left free"
        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", full)
            for _ in range(metrics_endpoint._AT_ONCE + 1):
                with pytest.raises(OSError):
                    get(place[1])
        assert get(place[1])[0] == 200, "a connection that got no thread takes no room"
    finally:
        endpoint.close()
