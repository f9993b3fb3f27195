"""A rank that another launcher started joins the SMP of its node, and leaves nothing open however it ends."""

import os
import threading
from pathlib import Path

import pytest

from ft_plugins.config import Config, launch_context
from ft_plugins.errors import ConfigError, FtError, ProtectionError
from ft_plugins.launcher import external_launch


class Ending:
    """The client of an SMP; records that it was asked to end."""

    ended = 0

    def __init__(self, run_dir, seconds):
        assert run_dir == Path("/run/of/node")

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def end(self):
        Ending.ended += 1


def opened():
    """What this process has open: the sockets and eventfds, and the threads."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of the listing
            continue
    return sorted(names), sorted(thread.name for thread in threading.enumerate())


def joined(rank, world, failing, in_order):
    """`failing`: why the first rank of the node has no SMP."""

    def bring_up(config):
        if failing is not None:
            raise failing
        return "/run/of/node", 7

    external_launch._bring_up = bring_up
    external_launch.smp.Client = Ending
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before, during = opened(), None
    outcome = {"error": None}
    try:
        context, leave = external_launch.join(
            Config.from_json({"reft": {}}), launch_context({name: str(value) for name, value in place.items()})
        )
        during = opened()
        outcome |= {"run_dir": context.run_dir, "token": context.token}
        leave(in_order)
        leave(True)
    except FtError as error:
        outcome["error"] = type(error).__name__
    return outcome | {"ended": Ending.ended, "left": opened() != before, "held": during not in (None, before)}


@pytest.mark.parametrize("in_order", [True, False])
def test_a_rank_holds_its_connections_until_it_leaves(ranks, in_order):
    found = ranks(joined, 2, None, in_order)
    assert [one["ended"] for one in found] == [int(in_order), 0], "the SMP ends with an orderly end, once"
    for one in found:
        assert one["error"] is None and (one["run_dir"], one["token"]) == (Path("/run/of/node"), 7)
        assert one["held"] and not one["left"]


@pytest.mark.parametrize("failing", [ProtectionError("no room"), ConfigError("no system is on")])
def test_a_rank_without_an_smp_leaves_nothing_open(ranks, failing):
    found = ranks(joined, 2, failing, True)
    for one in found:
        assert one["error"] == (None if isinstance(failing, ProtectionError) else "ConfigError")
        assert not one["held"] and not one["left"] and one["ended"] == 0
