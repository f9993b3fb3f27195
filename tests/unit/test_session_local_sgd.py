"""Local SGD in a session: equal to one process that simulates all replicas, and exact over a lost incarnation."""

from typing import Any

import numpy as np
import pytest
import torch

from ft_plugins.config import Config
from ft_plugins.errors import ConfigError, UnsupportedError
from ft_plugins.session import Session, attach
from harness.plain_host import PlainHost

from .incarnation import Incarnation, context
from .systems import local_replicas as local

Node = Any  # the fixture's class lives in conftest

NO_PENALTY = {"penalty": False}


def _life(rank, world, block, until, kind="sgd", bad=None, run_dir=None, token=0, ends=True):
    one = Incarnation(local.LocalTraining(rank, world, kind, bad), block, run_dir, token).run(until)
    if ends:
        one.session.shutdown()
    elif one.session._reft is not None:
        one.session._reft.wait_for_capture()  # the last version is sealed, as at the next fence
    return {
        "resumed": one.resumed,
        "fenced": one.fenced,
        "versions": one.versions,
        "end": one.training.digest(moments=False),
        "events": one.synchronised(),
        "state": one.session._sync.state(),
    }


def simulated(replicas, until, combine, tau, warmup=0, kind="sgd", late=False, bad=None):
    """Digests of the parameters that each iteration's gradients were computed with, and of those at the end, by
    replica. `late`: a synchronisation is applied before the next update."""
    simulation = local.Simulation(replicas, kind, bad)
    fenced, due = {}, False

    def synchronise(targets):
        for name, target in targets.items():
            simulation.write(name, target)
        simulation.remember()

    targets = {}
    for step in range(1, until + 1):
        simulation.backward(step, together=step <= warmup)
        fenced[step] = simulation.digests()
        if due and late:
            synchronise(targets)
        simulation.update()
        if step == warmup:
            simulation.remember()
        due = step > warmup and step % tau == 0
        if due:
            targets = {name: combine(simulation, name) for name in simulation.anchors}
            if not late:
                synchronise(targets)
    if due and late:
        synchronise(targets)
    return fenced, simulation.digests()


def mean(simulation, name):
    return simulation.mean(name)


def diloco(simulation, name):
    return simulation.outer(name, simulation.mean(name), 0.7, 0.9)


def edit_without_penalty(simulation, name):
    return simulation.outer(name, simulation.mean(name), 0.8, 0.85)


POLICIES = {
    "post_local_sgd": ({"policy": "post_local_sgd"}, mean),
    "diloco": ({"policy": "diloco"}, diloco),
    "edit": ({"policy": "edit", **NO_PENALTY}, edit_without_penalty),
}


def require_equal(found, expected):
    fenced, end = expected
    for rank, one in enumerate(found):
        for step, digests in fenced.items():
            assert one["fenced"][step] == digests[rank], f"rank {rank}, gradients of iteration {step}"
        assert one["end"] == end[rank], f"rank {rank}, at the end"


@pytest.mark.parametrize("apply", ["wait", "forward", "update"])
@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_equal_their_simulation_in_one_process_bit_for_bit(ranks, policy, apply):
    """Two replicas, whose sum in a warm-up does not depend on the order."""
    keys, combine = POLICIES[policy]
    block = {"sync": {**keys, "tau": 3, "warmup": 4, "apply": apply}}
    found = ranks(_life, 2, block, 13, "adam")
    require_equal(found, simulated(2, 13, combine, 3, 4, "adam", late=apply == "update"))
    assert [event["iteration"] for event in found[0]["events"]] == [6, 9, 12]


@pytest.mark.parametrize(("loaded", "resets"), [(0, []), (4, []), (5, [5])])
def test_a_checkpoint_that_holds_one_of_several_replicas_is_named(ranks, loaded, resets):
    """Up to the end of the warm-up replicas are equal: one is all of them."""
    for events in ranks(_resets, 2, loaded):
        assert [event["iteration"] for event in events] == resets
        assert all("holds one replica: all 2 start" in event["reason"] for event in events)


def _resets(rank, world, loaded):
    one = Incarnation(local.LocalTraining(rank, world), {"sync": {"policy": "edit", "tau": 3, "warmup": 4}})
    one.session.resume(loaded)
    one.session.shutdown()
    return [event.fields for event in one.events if event.name == "replicas.restarted"]


def test_four_replicas_are_combined_in_rank_order(ranks):
    found = ranks(_life, 4, {"sync": {"policy": "diloco", "tau": 2}}, 6)
    require_equal(found, simulated(4, 6, diloco, 2))


def test_synchronised_after_every_update_sgd_is_data_parallelism(ranks):
    """mean(w - lr g_i) and w - lr mean(g_i) differ by rounding alone: a few units in the last place of float32 after
    eight updates."""
    plain, averaged = ranks(_weights, 2, None), ranks(_weights, 2, {"sync": {"policy": "post_local_sgd", "tau": 1}})
    assert np.allclose(plain[0], averaged[0], rtol=1e-5, atol=1e-6)
    assert averaged[0] == averaged[1] != plain[0]


def _weights(rank, world, block):
    one = Incarnation(local.LocalTraining(rank, world), block or {}).run(8)
    one.session.shutdown()
    return list(flat(one.training.model))


def flat(model):
    return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in model.parameters()])


def test_edit_without_penalty_and_outer_momentum_is_post_local_sgd(ranks):
    keys = {"policy": "edit", "tau": 2, "outer_lr": 1.0, "outer_momentum": 0.0, **NO_PENALTY}
    one, other = (
        ranks(_life, 2, {"sync": keys}, 6),
        ranks(_life, 2, {"sync": {"policy": "post_local_sgd", "tau": 2}}, 6),
    )
    assert [each["end"] for each in one] == [each["end"] for each in other]


@pytest.mark.parametrize("option", [{"prefetch": False}, {"offload": True}])
def test_prefetch_and_host_memory_change_no_bit(ranks, option):
    keys = {"policy": "edit", "tau": 2, "penalty_warmup": 1, "clip": 0.05}
    one, other = ranks(_life, 2, {"sync": keys}, 8, "adam"), ranks(_life, 2, {"sync": {**keys, **option}}, 8, "adam")
    assert [each["fenced"] for each in one] == [each["fenced"] for each in other]
    assert all(event["clipped"] for event in one[0]["events"]), "the clip had something to do"


def _table(rank, world, keys):
    one = Incarnation(local.LocalTraining(rank, world), {"sync": keys})
    nbytes = sum(parameter.nbytes for parameter in one.training.model.parameters())
    one.session.shutdown()
    return one.session._sync.table(), nbytes


def test_the_memory_of_a_result_that_waits_for_the_next_update_is_printed(ranks):
    for apply in ("update", "wait"):
        text, nbytes = ranks(_table, 2, {"apply": apply})[0]
        held = f"; {nbytes} bytes more hold its result from a synchronisation to the next update"
        assert (held in text) == (apply == "update") and (" more " in text) == (apply == "update")


# ---- the penalty ----

ALPHA, THRESHOLD, WARMUP, CLIP = 0.3, 3.0, 2, 0.5


class Penalised:
    """EDiT's penalty as the paper has it, in NumPy, with its outer optimizer."""

    def __init__(self):
        self.statistics = {}
        self.left_out = []

    def __call__(self, simulation, name):
        anchor = simulation.anchors[name].astype(np.float64)
        changes = [simulation.modules(r)[name].astype(np.float64) - anchor for r in range(len(simulation.models))]
        norms = [float(np.sqrt(np.square(change).sum())) for change in changes]
        sound = {r: norm for r, norm in enumerate(norms) if np.isfinite(norm) and not self._outlier(name, r, norm)}
        self.left_out += [(name, r) for r in range(len(norms)) if r not in sound]
        for r, norm in (sound or {r: norm for r, norm in enumerate(norms) if np.isfinite(norm)}).items():
            self._absorb(name, r, norm)
        if not sound:
            return simulation.anchors[name]
        powers = {r: np.exp(min(sound.values()) - norm) for r, norm in sound.items()}
        change = sum(powers[r] / sum(powers.values()) * changes[r] for r in sound)
        change = change * min(1.0, CLIP / (np.sqrt(np.square(change).sum()) + 1e-6))
        return simulation.outer(name, (anchor + change).astype(np.float32), 0.8, 0.85)

    def _outlier(self, name, replica, norm):
        mean, deviation, count = self.statistics.get((name, replica), (0.0, 0.0, 0))
        return count >= WARMUP and deviation > 0 and (norm - mean) / deviation > THRESHOLD

    def _absorb(self, name, replica, norm):
        mean, deviation, count = self.statistics.get((name, replica), (norm, 0.0, 0))
        new = ALPHA * norm + (1 - ALPHA) * mean
        variance = (1 - ALPHA) * deviation**2 + ALPHA * (norm - new) ** 2
        self.statistics[name, replica] = (new, float(np.sqrt(variance)), count + 1)


PENALTY = {"policy": "edit", "tau": 2, "alpha": ALPHA, "threshold": THRESHOLD, "penalty_warmup": WARMUP, "clip": CLIP}


@pytest.mark.parametrize("apply", ["wait", "forward", "update"])
def test_a_replica_that_trains_on_garbage_is_left_out_as_the_paper_has_it(ranks, apply):
    """Garbage from the tenth iteration on. Equal up to rounding: the reference sums norms in another order, and a
    weight that differs in its last bit of float64 may round a parameter to the next float32 now and then."""
    bad = {1: (10, 14)}
    reference = Penalised()
    found = ranks(_trained, 3, {"sync": {**PENALTY, "apply": apply}}, 16, bad)
    expected = _simulated_weights(3, 16, reference, 2, apply == "update", bad)
    for rank in range(3):
        assert np.allclose(found[rank]["weights"], expected, rtol=1e-5, atol=1e-6)
    left_out = [
        (name, rank) for event in found[0]["events"] for name, those in event["left_out"].items() for rank in those
    ]
    assert sorted(left_out) == sorted(reference.left_out) and ("0", 1) in left_out
    garbage = [event for event in found[0]["events"] if event["iteration"] == 10]
    assert garbage[0]["left_out"] == {name: [1] for name in ("0", "2", "4")}


def _trained(rank, world, block, until, bad):
    one = Incarnation(local.LocalTraining(rank, world, "sgd", bad), block).run(until)
    one.session.shutdown()
    return {"weights": flat(one.training.model), "events": one.synchronised()}


def _simulated_weights(replicas, until, combine, tau, late, bad):
    simulation = local.Simulation(replicas, "sgd", bad)
    targets = {}

    def synchronise():
        for name, target in targets.items():
            simulation.write(name, target)
        simulation.remember()

    for step in range(1, until + 1):
        simulation.backward(step, together=False)
        if targets and late:
            synchronise()
        targets = {}
        simulation.update()
        if step % tau == 0:
            targets = {name: combine(simulation, name) for name in simulation.anchors}
            if not late:
                synchronise()
    if targets and late:
        synchronise()
    return flat(simulation.models[0])


def test_a_replica_that_is_not_finite_is_left_out_and_trains_on(ranks):
    found = ranks(_with_infinity, 3, {"sync": {**PENALTY, "apply": "wait"}})
    for one in found:
        assert one["finite"] and one["end"] == found[0]["end"]
    assert found[0]["events"][0]["left_out"] == {name: [2] for name in ("0", "2", "4")}


def test_if_no_replica_is_finite_all_go_back_to_the_last_synchronisation(ranks):
    found = ranks(_with_infinity, 2, {"sync": {**PENALTY, "apply": "forward"}}, (0, 1))
    for one in found:
        assert one["finite"] and one["end"] == found[0]["end"] == one["begin"]
    assert found[0]["events"][0]["rolled_back"] == ["0", "2", "4"]


def _with_infinity(rank, world, block, those=(2,)):
    one = Incarnation(local.LocalTraining(rank, world), block)
    begin = one.training.digest(moments=False)
    one.run(1)
    if rank in those:
        with torch.no_grad():
            for parameter in one.training.named.values():
                parameter.view(-1)[0] = float("nan")
    one.run(2)
    one.session.shutdown()
    finite = all(bool(parameter.isfinite().all()) for parameter in one.training.named.values())
    return {"finite": finite, "begin": begin, "end": one.training.digest(moments=False), "events": one.synchronised()}


# ---- snapshots ----


@pytest.mark.parametrize(
    "keys", [{"apply": "wait"}, {"apply": "forward"}, {"apply": "forward", "prefetch": False}, {"apply": "update"}]
)
@pytest.mark.parametrize("versions", ["sync", "every"])
def test_a_job_that_ends_between_two_synchronisations_continues_bit_for_bit(node, ranks, keys, versions):
    """Killed after iteration 8 of a job that is synchronised after 3, 6 and 9."""
    block = {"sync": {**PENALTY, "tau": 3, "warmup": 1, **keys}}
    whole = ranks(_life, 2, block, 13, "adam")
    node.start()
    protected = {**block, "reft": {"versions": versions}, "node_name": "n"}
    first = ranks(_life, 2, protected, 8, "adam", None, node.run_dir, node.fence(), False)
    second = ranks(_life, 2, protected, 13, "adam", None, node.run_dir, node.fence())
    for rank in range(2):
        assert (first[rank]["resumed"], second[rank]["resumed"]) == (0, 6 if versions == "sync" else 8)
        assert {**first[rank]["fenced"], **second[rank]["fenced"]} == whole[rank]["fenced"]
        assert second[rank]["end"] == whole[rank]["end"]
        assert second[rank]["state"] == whole[rank]["state"], "norms so far, and the number of synchronisations"
    marks = {slot["iteration"]: slot.get("mark") for slot in node.status()["segments"][0]["slots"]}
    assert set(marks) <= ({6, 9, 12} if versions == "sync" else {10, 11, 12, 13})


def test_a_version_that_is_captured_during_a_forward_has_the_statistics_of_its_synchronisation(node, ranks):
    """Replica 1 trains on garbage after the version from which the job is resumed: what is an outlier then follows from
    the norms of all synchronisations before."""
    block = {"sync": {**PENALTY, "tau": 2, "penalty_warmup": 3, "apply": "forward"}}  # judged from iteration 8 on
    bad = {1: (7, 8)}
    whole = ranks(_life, 2, block, 9, "sgd", bad)
    node.start()
    protected = {**block, "reft": {}, "node_name": "n"}
    ranks(_life, 2, protected, 7, "sgd", bad, node.run_dir, node.fence(), False)
    second = ranks(_life, 2, protected, 9, "sgd", bad, node.run_dir, node.fence())
    assert second[0]["resumed"] == 6 and second[0]["events"][0]["left_out"] == whole[0]["events"][3]["left_out"]
    assert whole[0]["events"][3]["left_out"] == {name: [1] for name in ("0", "2", "4")}


def test_a_job_that_ends_at_a_synchronisation_continues_bit_for_bit(node, ranks):
    """Also after an orderly end, which applies what is under way. With apply update, the synchronisation of iteration 6
    is in flight when its version is taken."""
    for apply, ends in (("wait", False), ("update", False), ("update", True), ("forward", True)):
        block = {"sync": {**PENALTY, "tau": 3, "apply": apply}}
        whole = ranks(_life, 2, block, 10, "adam")
        node.start()
        protected = {**block, "reft": {}, "node_name": "n"}
        ranks(_life, 2, protected, 6, "adam", None, node.run_dir, node.fence(), ends)
        second = ranks(_life, 2, protected, 10, "adam", None, node.run_dir, node.fence())
        for rank in range(2):
            assert second[rank]["resumed"] == 6
            assert second[rank]["fenced"].items() <= whole[rank]["fenced"].items()
            assert second[rank]["end"] == whole[rank]["end"]
            assert second[rank]["state"] == whole[rank]["state"], "norms so far, and the number of synchronisations"
        node.end()


def _captured(rank, world, block):
    one = Incarnation(local.LocalTraining(rank, world, "adam"), block)
    assert one.session._carrying.tensors().keys() == {item.name for item in one.session._carrying.inventory().items}
    return {item.name: item.replicas for item in one.session._carrying.inventory().items}


def test_replicas_share_out_what_is_identical_at_a_synchronisation(ranks):
    """Of what is captured: moments are each replica's own, and so are parameters between two synchronisations."""
    names = dict(local.network().named_parameters())
    moments = {f"{name}.{key}": (1,) for name in names for key in ("exp_avg", "exp_avg_sq", "step")}
    momentum = {f"local_sgd.momentum:{name}": (0, 1) for name in names}
    anchors = {f"local_sgd.anchor:{name}": (0, 1) for name in names}
    for keys, versions, parameters, more in (
        ({"apply": "wait"}, "sync", (0, 1), {}),
        ({"apply": "forward"}, "sync", (0, 1), {}),
        ({"apply": "wait"}, "every", (1,), anchors),
        ({"apply": "update"}, "sync", (1,), anchors),
    ):
        _, captured = ranks(_captured, 2, {"sync": {**keys, **NO_PENALTY}, "reft": {"versions": versions}})
        assert captured == {**dict.fromkeys(names, parameters), **moments, **momentum, **more}


# ---- refusals ----


@pytest.mark.parametrize(
    "block, message",
    [
        ({"tau": 0}, "sync.tau: expected an integer >= 1"),
        ({"policy": "post_local_sgd", "outer_lr": 0.5}, "sync.outer_lr: has no effect with post_local_sgd"),
        ({"policy": "diloco", "clip": 1.0}, "sync.clip: has no effect without the penalty of edit"),
        ({"apply": "wait", "prefetch": False}, "sync.prefetch: has no effect with apply wait"),
        (
            {"policy": "diloco", "prefetch": False},
            "sync.prefetch: has no effect with apply wait, which is that of diloco",
        ),
        ({"policy": "post_local_sgd", "prefetch": True}, "sync.prefetch: has no effect with apply wait"),
        ({"apply": "update", "prefetch": True}, "sync.prefetch: has no effect with apply update"),
        ({"policy": "a_edit", "seconds": 5.0, "tau": 128}, "sync.tau: has no effect with a_edit"),
        ({"policy": "diloco", "alpha": 0.02}, "sync.alpha: has no effect without the penalty of edit"),
        ({"penalty": False, "clip": 10.0}, "sync.clip: has no effect without the penalty of edit"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(block, message):
    with pytest.raises(ConfigError) as refused:
        Config.from_json({"sync": block})
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_keys_that_have_an_effect_may_be_given_with_their_default():
    for keys in (
        {"prefetch": True},
        {"policy": "diloco", "apply": "forward", "prefetch": False},
        {"clip": 10.0, "tau": 128},
    ):
        assert Config.from_json({"sync": keys}).sync is not None


def test_local_sgd_is_refused_beside_paft_and_with_one_replica():
    for other, message in (({"paft": {}}, "both average"), ({"paft": {"mode": "audit"}}, "lets differ")):
        with pytest.raises(ConfigError, match=message):
            Config.from_json({"sync": {}, **other})
    assert Config.from_json({"sync": {}, "baft": {}}).systems == ("baft", "sync")
    with pytest.raises(UnsupportedError, match="no other replica"):
        attach(local.LocalTraining(0, 1).host, Config.from_json({"sync": {}}), context(0, 1)).resume()
    with pytest.raises(UnsupportedError, match="reduction of gradients cannot be controlled"):
        Session(PlainHost({"w": torch.zeros(4)}), Config.from_json({"sync": {}}), context(0, 1))


def test_naming_a_policy_switches_local_sgd_on():
    config, rest = Config.from_flags(["--sync-policy", "diloco", "--sync-tau", "7"])
    assert config.sync is not None and (config.sync.policy, config.sync.tau, rest) == ("diloco", 7, [])
    assert Config.from_flags(config.flags())[0] == config


# ---- replicas that do not do the same ----

SKIPPED = (1, 2)  # two layers in a row: the exchange of one is started before it is missed


def _skipping(rank, world, keys):
    """Layers of one size, two of which replica 0 leaves out of its forward in the iteration after a synchronisation.
    Parameters of each layer before the synchronisation, and after that iteration."""
    torch.manual_seed(rank)
    layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(5)))
    named = dict(layers.named_parameters())
    host = local.ReducedHost(
        layers, {name: one.detach() for name, one in named.items()}, rank=rank, world_size=world, replicated=True,
        learning_rate=lambda: 0.0,
    )  # fmt: skip
    session = attach(
        host, Config.from_json({"sync": {"policy": "post_local_sgd", "tau": 2, **keys}}), context(rank, world)
    )
    session.resume()
    means = []
    for step in range(1, 4):
        session.iteration_begin(step)
        hidden = torch.ones(3)
        for place, layer in enumerate(layers):
            if step < 3 or rank or place not in SKIPPED:
                hidden = layer(hidden)
        if step == 2:
            for place, layer in enumerate(layers):
                torch.nn.init.constant_(layer.weight, 100.0 * place + rank)
                torch.nn.init.constant_(layer.bias, 100.0 * place + rank)
        session.before_update(step)
        session.after_update(step)
        session.iteration_end(step)
    means = [float(one.mean()) for one in named.values()]
    session.shutdown()
    return {"means": means}


@pytest.mark.parametrize("keys", [{"apply": "forward"}, {"apply": "forward", "prefetch": False}])
def test_replicas_that_leave_out_different_layers_still_combine_the_same_ones(ranks, keys):
    for one in ranks(_skipping, 2, keys):
        assert one["means"] == [100.0 * place + 0.5 for place in range(5) for _ in ("weight", "bias")]


def test_a_change_of_when_synchronisations_are_applied_repeats_none(node, ranks):
    """The version of iteration 6 holds its synchronisation with apply wait, and does not with update."""
    node.start()
    numbers = {}
    for number, (before, after) in enumerate((("wait", "update"), ("update", "wait"))):
        protected = {"sync": {"policy": "diloco", "tau": 3}, "reft": {"versions": "every"}, "node_name": "n"}
        first, second = ({**protected, "sync": {**protected["sync"], "apply": apply}} for apply in (before, after))
        if number:
            node.end()
            node.start()
        ranks(_life, 2, first, 6, "adam", None, node.run_dir, node.fence(), False)
        found = ranks(_life, 2, second, 9, "adam", None, node.run_dir, node.fence())
        assert all(one["resumed"] == 6 for one in found)
        numbers[before] = [(event["iteration"], event["number"]) for event in found[0]["events"]]
        assert found[0]["end"] == found[1]["end"]
    assert numbers == {"wait": [(9, 3)], "update": [(6, 2), (9, 3)]}
