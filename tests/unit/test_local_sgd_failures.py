"""A replica that is not finite, that stops or that ends in the middle of a synchronisation: a defined answer."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ft_plugins.base import faults
from ft_plugins.config import Config
from ft_plugins.errors import ConfigError, ProtocolError
from ft_plugins.model.inventory import Inventory
from ft_plugins.session import attach
from ft_plugins.systems.local_sgd.sync_groups import PeerWait

from . import test_session_local_sgd as sessions
from .incarnation import Incarnation, context

POLICIES = {
    "post_local_sgd": {"policy": "post_local_sgd"},
    "diloco": {"policy": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0},
    "edit": {"policy": "edit", "penalty": False, "outer_lr": 1.0, "outer_momentum": 0.0},
}
TAU, MODULE, NAN = 2, "2", float("nan")


# ---- not finite ----


def _poisoned(rank, world, sync, those, uncounted=False):
    """Train to the first synchronisation and one iteration further. Right before it one value of a module of the ranks
    `those` becomes NaN. `uncounted`: norms leave that parameter out, as a second copy of it."""
    if uncounted:
        inventory = sessions.local.ReducedHost.inventory
        sessions.local.ReducedHost.inventory = lambda host: Inventory.of(
            host.rank,
            (replace(item, in_norm=item.name != f"{MODULE}.weight") for item in inventory(host).items),
        )
    one = Incarnation(sessions.local.LocalTraining(rank, world), {"sync": {**sync, "tau": TAU}})
    named, before = one.training.named, {}
    start = {name: parameter.detach().numpy().copy() for name, parameter in named.items()}

    def poison(*given):
        if one.completed != TAU - 1:
            return
        if rank in those:
            with torch.no_grad():
                named[f"{MODULE}.weight"].view(-1)[0] = NAN
        before.update({name: parameter.detach().numpy().copy() for name, parameter in named.items()})

    one.training.optimizer.register_step_post_hook(poison)
    one.run(TAU)
    one.session.shutdown()  # applies what is under way
    end = {name: parameter.detach().numpy().copy() for name, parameter in named.items()}
    alarms = [event.fields for event in one.events if event.name == "nonfinite.detected"]
    return {"start": start, "before": before, "end": end, "events": one.synchronised(), "alarms": alarms}


@pytest.mark.parametrize("apply", ["wait", "forward", "update"])
@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_penalty_a_replica_that_is_not_finite_is_left_out_of_that_module_by_name(ranks, policy, apply):
    """As a whole: its other values may come from the same error. Its other modules take part."""
    found = ranks(_poisoned, 3, {**POLICIES[policy], "apply": apply}, (1,))
    for name, end in found[0]["end"].items():
        those = (0, 2) if name.startswith(MODULE) else (0, 1, 2)
        mean = sum(found[rank]["before"][name].astype(np.float64) for rank in those) / len(those)
        assert all(np.array_equal(one["end"][name], end) for one in found)
        np.testing.assert_allclose(end, mean, rtol=1e-6)  # rounded in the sum of three, and through the anchor
        if policy == "post_local_sgd":
            assert np.array_equal(end, mean.astype(np.float32))
    for one in found:
        (event,), (alarm,) = one["events"], one["alarms"]
        assert event["left_out"] == event["nonfinite"] == {MODULE: [1]} and event["rolled_back"] == []
        assert (alarm["iteration"], alarm["ranks"]) == (TAU, "1")
        assert alarm["reason"] == f"non-finite parameters on ranks 1 after iteration {TAU}, in {MODULE}"


def test_without_a_penalty_a_module_of_which_no_replica_is_finite_goes_back(ranks):
    found = ranks(_poisoned, 2, {"policy": "post_local_sgd"}, (0, 1))
    for one in found:
        for name, end in one["end"].items():
            same = found[0]["start"] if name.startswith(MODULE) else found[0]["end"]
            assert np.array_equal(end, same[name]) and np.isfinite(end).all()
        assert one["events"][0]["rolled_back"] == [MODULE] and one["alarms"][0]["ranks"] == "0, 1"


def test_a_copy_that_norms_leave_out_is_looked_at_too(ranks):
    """The copies of a tied embedding, and what tensor-parallel ranks duplicate: averaged, but not measured."""
    found = ranks(_poisoned, 3, sessions.PENALTY, (1,), True)
    for one in found:
        assert all(np.isfinite(end).all() for end in one["end"].values())
        assert one["events"][0]["left_out"] == one["events"][0]["nonfinite"] == {MODULE: [1]}


def test_sound_replicas_raise_no_alarm(ranks):
    for one in ranks(_poisoned, 2, {"policy": "diloco"}, ()):
        assert one["alarms"] == [] and one["events"][0]["nonfinite"] == one["events"][0]["left_out"] == {}


# ---- late, or gone ----

SECONDS = 4.0


def _stalled(rank, world, keys, where):
    """Rank 1 is stopped by SIGSTOP; rank 0 wakes it when its own wait has ended. Returns the error."""
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    one = Incarnation(sessions.local.LocalTraining(rank, world), {"sync": {"tau": TAU, "timeout": SECONDS, **keys}})
    if rank == 1 and where == "exchange":
        faults.arm("sync.exchange@hit=2:stop")
    if rank == 1 and where == "update":
        hook = one.training.optimizer.register_step_post_hook(lambda *given: _stop_once(hook))
    try:
        one.run(4)
    except ProtocolError as error:
        return str(error)
    finally:
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
    return ""


def _stop_once(hook):
    hook.remove()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("keys", "where", "what"),
    [
        ({"policy": "post_local_sgd"}, "exchange", f"iteration {TAU}, module '2'"),
        ({"policy": "edit", "apply": "forward"}, "exchange", f"iteration {TAU}, module '2'"),
        ({"policy": "edit", "apply": "update"}, "exchange", f"iteration {TAU}, module '2'"),
        ({"policy": "edit", "apply": "wait"}, "update", f"iteration {TAU}, module '0'"),
        ({"policy": "edit", "apply": "update"}, "update", f"iteration {TAU}, the update"),
    ],
)
def test_a_replica_that_stops_ends_the_wait_of_the_others_with_one_line(ranks, keys, where, what):
    waits, _ = ranks(_stalled, 2, keys, where)
    assert waits == (
        f"rank 0: local SGD, {what}: a rank of its sync group [0, 1] or of its replica [0] did not come within 4 s: it "
        "hangs, or its link does; the job goes back to its last version (if it is only slow, raise --sync-timeout)"
    )


def _readiness(rank, world):
    """The seconds of the groups on processors, and the error of a wait for another replica to be ready."""
    made, new_group = list[float](), dist.new_group

    def record(ranks, timeout, backend=None):
        if backend == "gloo":
            made.append(timeout.total_seconds())
        return new_group(ranks, timeout, backend)

    dist.new_group = record
    keys = {"policy": "a_edit", "seconds": 20, "timeout": 7}
    session = attach(
        sessions.local.LocalTraining(rank, world).host, Config.from_json({"sync": keys}), context(rank, world)
    )

    def late():
        raise RuntimeError("Timed out waiting 27000ms for recv operation to complete")

    session._sync._clocked._keeper.joins = late
    with pytest.raises(ProtocolError) as raised:
        session._sync._due(3)
    return made, str(raised.value)


def test_a_replica_may_wait_for_a_whole_period_until_the_others_are_ready(ranks):
    """The first to be ready goes on training meanwhile: the period is not time in which another one has hung."""
    for rank, (made, error) in enumerate(ranks(_readiness, 2)):
        assert made == [7 + 20]
        assert f"rank {rank}: local SGD, iteration 3, the readiness of all replicas: " in error
        assert "did not come within 27 s: " in error


@pytest.mark.parametrize(
    ("torchs", "outcome"),
    [
        ("[unbound_buffer.cc:83] Timed out waiting 4000ms for recv operation to complete", "did not come within 4 s"),
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:14222", "of its replica [1, 3] has ended"),
        ("[pair.cc:525] Read error [127.0.0.1]:1422: Connection reset by peer", "of its replica [1, 3] has ended"),
    ],
)
def test_what_torch_says_of_a_peer_becomes_one_line(torchs, outcome):
    def fails():
        raise RuntimeError(torchs)

    with pytest.raises(ProtocolError, match="rank 3: local SGD, iteration 8, module 'head': ") as raised:
        PeerWait(3, (2, 3), (1, 3), 4.0).within(8, "module 'head'", fails)
    assert outcome in str(raised.value) and "\n" not in str(raised.value)


def test_another_error_passes_unchanged():
    def fails():
        raise RuntimeError("The size of tensor a (4) must match the size of tensor b (3)")

    with pytest.raises(RuntimeError, match="The size of tensor a"):
        PeerWait(0, (0, 1), (0,), 4.0).within(8, "module 'head'", fails)
    assert PeerWait(0, (0, 1), (0,), 4.0).within(8, "module 'head'", lambda: 7) == 7


def test_the_time_to_wait_is_a_key():
    config, _ = Config.from_flags(["--sync", "--sync-timeout", "60"])
    assert config.sync is not None and config.sync.timeout == 60 and Config.from_json({"sync": {}}).sync.timeout == 1800
    with pytest.raises(ConfigError, match="sync.timeout: expected a number >= 1"):
        Config.from_json({"sync": {"timeout": 0}})
