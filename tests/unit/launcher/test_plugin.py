"""What a node is told about the rendezvous, by torch's words for it."""

import socket
import stat
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from ft_plugins.config import run_root
from ft_plugins.errors import ConfigError
from ft_plugins.launcher.rendezvous.endpoint import Endpoint
from ft_plugins.launcher.rendezvous.rendezvous_settings import RendezvousSettings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seats": "8"}, "unknown key 'seats'"),
        ({"is_host": "1"}, "unknown key 'is_host'; ft_plugins knows command, detect_seconds"),
        ({"sizes": "4;2"}, "sizes: expected numbers of nodes as 8/6/4, found '4;2'"),
        ({"sizes": "4,1"}, "sizes: expected .* found 1"),
        ({"node_rank": "4"}, "node_rank: expected 0 to 3, found '4'"),
        ({"wait_seconds": "soon"}, "wait_seconds: expected seconds >= 0, found 'soon'"),
        ({"endpoint": ""}, "--rdzv-endpoint: expected host:port of one of the 4 nodes"),
        ({"endpoint": "localhost:0"}, "--rdzv-endpoint: expected host:port of one of the 4 nodes"),
        ({"endpoint": "a:b"}, "--rdzv-endpoint: expected host:port"),
        (
            {"endpoint": "h:29400"},
            "--rdzv-endpoint h:29400: other machines can reach it, .*--ftp-secret-file FILE.*umask 077",
        ),
        ({"endpoint": "127.0.0.1:1,10.0.0.1:1"}, "--rdzv-endpoint 10.0.0.1:1: other machines can reach it"),
        ({"endpoint": "h:1", "min_nodes": 1, "max_nodes": 1}, "other machines can reach it"),
        ({"secret_file": "/no/such/file"}, "--ftp-secret-file /no/such/file: cannot be read"),
        ({"run_id": "r" * 300}, "--rdzv-id: expected 1 to 256 printable characters"),
        ({"run_id": "r\n"}, "--rdzv-id: expected 1 to 256 printable characters"),
        ({"node_name": "a b"}, "node_name: expected 1 to 48 letters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_refused_in_words(given, said):
    fields = {"endpoint": "localhost:29400", "run_id": "r", "min_nodes": 2, "max_nodes": 4, **given}
    with pytest.raises(ConfigError, match=said):
        RendezvousSettings.read(RendezvousParameters("ft_plugins", **fields))


def test_settings_are_read_as_given_and_have_defaults(tmp_path):
    plain = RendezvousSettings.read(RendezvousParameters("ft_plugins", "", "r", 1, 1, timeout=900))
    assert (plain.endpoints, plain.node, plain.wanted, plain.run_dir) == ((), socket.gethostname(), None, None)
    assert (plain.rules.last_call, plain.rules.wait, plain.join, plain.silence) == (30, 30, 600, 10)
    assert plain.loopback_only
    file = tmp_path / "secret"
    file.write_text("sixteen bytes or more")
    file.chmod(0o600)
    full = RendezvousParameters(
        "ft_plugins",
        "a, b:7 ,[::1]:8",
        "r",
        2,
        8,
        sizes="8/6/4",
        wait_seconds="60",
        node_rank="3",
        node_name="n",
        run_dir="/x",
        secret_file=str(file),
    )
    found = RendezvousSettings.read(full)
    assert found.endpoints == (Endpoint("a", 29400), Endpoint("b", 7), Endpoint("::1", 8))
    assert [str(endpoint) for endpoint in found.endpoints] == ["a:29400", "b:7", "[::1]:8"]
    assert (found.rules.sizes, found.rules.wait, found.rules.last_call, found.wanted) == ((8, 6, 4), 60, 30, 3)
    assert (found.node, found.run_dir) == ("n", Path("/x"))
    assert (found.secret, found.loopback_only) == (b"sixteen bytes or more", False)
    assert "sixteen" not in repr(found)


def test_without_a_file_jobs_of_this_user_on_this_machine_share_a_secret_that_only_he_can_read():
    one, other = (RendezvousSettings.read(RendezvousParameters("ft_plugins", "", run, 1, 1)) for run in "ab")
    assert one.secret == other.secret and len(one.secret) >= 32
    [file] = run_root().glob("secret*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_bytes() == one.secret
