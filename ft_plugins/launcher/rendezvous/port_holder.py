"""Which other processes of this machine listen at an endpoint, for a message.

In: an endpoint, /proc. Out: words for people, '' if there is none, or the endpoint is another machine's.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing

from ...errors import printable
from .endpoint import Endpoint

_SHOWN = 80  # characters of a command line
_EVERY_ADDRESS = ("0.0.0.0", "::")


def others_at(place: Endpoint) -> str:
    """The processes but this one that listen there."""
    import psutil  # slow, and only needed here

    try:
        resolved = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        addresses = {str(each[0]) for *_, each in resolved if _is_here(str(each[0]))}
        listening = psutil.net_connections("tcp") if addresses else []
    except (OSError, UnicodeError, psutil.Error):
        return ""
    pids = [
        each.pid
        for each in listening
        if each.status == psutil.CONN_LISTEN
        and each.laddr.port == place.port
        and each.laddr.ip in (*addresses, *_EVERY_ADDRESS)
    ]
    return ", ".join(_described(pid) for pid in dict.fromkeys(pids) if pid != os.getpid())


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _described(pid: int | None) -> str:
    import psutil

    if pid is None:
        return "a process of another user"
    try:
        words = " ".join(psutil.Process(pid).cmdline()).split()
        return f"process {pid} ({printable(' '.join(words))[:_SHOWN]})"
    except psutil.Error:
        return f"process {pid}"
