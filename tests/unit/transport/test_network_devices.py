"""What names the network devices of a job, and whether it names the same."""

import pytest

from ft_plugins.launcher import command
from ft_plugins.launcher.node_launch import Outcome
from ft_plugins.transport.network_devices import IFNAMES, NetworkDevice, interfaces_differ

GLOO, NCCL = IFNAMES
DEVICES = (NetworkDevice("eth0", True, ("10.0.0.1",)), NetworkDevice("ib0", True, ("10.1.0.1",)))


@pytest.mark.parametrize(
    ("interface", "ifnames", "said", "remedy"),
    [
        ("eth0", {GLOO: "ib0"}, ["--ftp-interface eth0", f"{GLOO}=ib0"], f"set {GLOO}=eth0,"),
        ("10.0.0.1", {NCCL: "^eth"}, ["--ftp-interface 10.0.0.1", f"{NCCL}=^eth"], f"set {NCCL}=eth0,"),
        (None, {GLOO: "ib0", NCCL: "eth"}, [f"{GLOO}=ib0", f"{NCCL}=eth"], f"set {NCCL}=ib0,"),
        (None, {GLOO: "eth"}, [f"{GLOO}=eth"], "name one of eth0, ib0"),
    ],
)  # fmt: skip
def test_names_that_differ_are_said_with_what_to_do(interface, ifnames, said, remedy):
    sentence = interfaces_differ(interface, ifnames, DEVICES)
    assert all(each in sentence for each in said) and remedy in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    ("interface", "ifnames"),
    [
        ("eth0", {GLOO: "ib0,eth0", NCCL: "eth"}),
        (None, {GLOO: "ib0,eth0", NCCL: "=eth0"}),
        (None, {NCCL: "^lo"}),
        ("eth0", {}),
    ],
)
def test_names_of_the_same_device_are_not_spoken_of(interface, ifnames):
    assert interfaces_differ(interface, ifnames, DEVICES) == ""


def test_ft_run_warns_at_its_start(monkeypatch, capsys):
    """Even if what it starts ends at once."""
    monkeypatch.setattr(command, "network_devices", lambda: DEVICES)
    monkeypatch.setenv(GLOO, "ib0")
    monkeypatch.delenv(NCCL, raising=False)

    def ends(planned):
        assert planned.config.interface == "eth0"
        return Outcome("succeeded")

    monkeypatch.setattr(command, "execute", ends)
    assert command.main(["--reft", "--ftp-interface", "eth0", __file__]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "interface" in line]
    assert line.startswith("ft-run: warning: --ftp-interface eth0, GLOO_SOCKET_IFNAME=ib0 name different devices")
