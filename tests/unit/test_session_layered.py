"""DreamDDP in a session: equal to one process that simulates all replicas, in both update orders; exact over a lost
incarnation; planned from what the job measures, and the same way on all ranks."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config
from ft_plugins.errors import ConfigError, StateChangedError, UnsupportedError
from ft_plugins.session import attach
from ft_plugins.sync.layers.layer_profile import read_profile
from ft_plugins.sync.layers.layers_schedule import equal_number
from ft_plugins.sync.rounds.synchronisation import Synchronisation

from .incarnation import context
from .systems import local_replicas as local

Node = Any  # the fixture's class lives in conftest

LAYERS = ("0", "2", "4")
WARMUP, TAU, LAST = 2, 7, 17
KILLED, RESUMED = 16, 14
SYNC = {"policy": "dreamddp", "schedule": "equal", "h": 2, "warmup": WARMUP, "tau": TAU}


class Job(local.LocalTraining):
    """A replica whose loop is one of plain torch. `clips`: the loop clips gradients."""

    def __init__(self, rank, world, kind, clips=False):
        super().__init__(rank, world, kind)
        self.optimizer = local.optimizer_of(self.model, kind)
        self.parallel = DistributedDataParallel(self.model)
        self.host, self.clips = TorchHost(self.parallel, self.optimizer), clips

    def iterate(self, step):
        """Returns the digest of the parameters after the update."""
        local.gradients(self.parallel, step, self.rank)
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        digest = self.digest(moments=False)
        self.optimizer.zero_grad()
        return digest


def _life(rank, world, block, last, kind="sgd", run_dir=None, token=0, left_in=0, clips=False):
    """One incarnation, which ends in iteration `left_in`, after its update. Digests by iteration; events; schedule."""
    job = Job(rank, world, kind, clips)
    session = attach(job.host, Config.from_json(block), context(rank, world, run_dir, token))
    events = []
    session._events.subscribe(events.append)
    digests, began, step = {}, 0, 0
    for step in session.iterations(last):
        began = began or step
        digests[step] = job.iterate(step)
        if step == left_in:
            break
    return {"began": began, "digests": digests, "events": events, "state": session._sync.state()["layers"]}


def simulated(replicas, period, update_first, kind="sgd", last=LAST, warmup=WARMUP, tau=TAU, sets=(), divergences=None):
    """Digests of all replicas after each iteration's update. `divergences`: receives that of what is averaged."""
    simulation, digests = local.Simulation(replicas, kind), {}
    sets = sets or [[LAYERS[layer] for layer in own] for own in equal_number(len(LAYERS), period).iterations]
    for step in range(1, last + 1):
        simulation.backward(step, together=step <= warmup)
        whole = step > warmup and step % tau == 0
        due = sets[(step - warmup - 1) % period] if step > warmup and not whole else []
        if update_first:
            simulation.update()
        if divergences is not None and due:
            rows = [np.concatenate([simulation.modules(one)[name] for name in due]) for one in range(replicas)]
            divergences[step] = float(np.var(np.stack(rows).astype(np.float64), axis=0).sum())
        for name in () if update_first else due:
            simulation.write(name, simulation.mean(name))
        if not update_first:
            simulation.update()
        for name in (due if update_first else ()) if not whole else LAYERS:
            simulation.write(name, simulation.mean(name))
        digests[step] = simulation.digests()
    return digests


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("order", ["average_first", "update_first"])
@pytest.mark.parametrize(("period", "replicas"), [(1, 2), (2, 2), (3, 3)])
def test_equals_one_process_that_simulates_the_schedule(ranks, order, period, replicas, kind):
    """No warm-up with three replicas: the order in which DistributedDataParallel sums their gradients is its own."""
    warmup = WARMUP if replicas == 2 else 0
    block = {"sync": {**SYNC, "h": period, "order": order, "warmup": warmup}}
    divergences = {}
    expected = simulated(replicas, period, order == "update_first", kind, warmup=warmup, divergences=divergences)
    for rank, found in enumerate(ranks(_life, replicas, block, LAST, kind)):
        assert found["digests"] == {step: each[rank] for step, each in expected.items()}
        averaged = [event.fields["iteration"] for event in found["events"] if event.name == "layers.averaged"]
        assert averaged == [step for step in range(warmup + 1, LAST + 1) if step % TAU]
        measured = {one.fields["iteration"]: one.fields["divergence"] for one in found["events"]
                    if one.name == "layers.averaged"}  # fmt: skip
        # distances are rounded to float32 before they are squared: 6e-8, twice, of parameters of about 1
        assert measured == pytest.approx(divergences, rel=1e-4, abs=1e-12)
    assert len(set(expected[TAU])) == 1, "replicas are identical where all layers are synchronised"
    assert (len(set(expected[TAU + 1])) == 1) == (period == 1 and order == "update_first")


def test_update_first_in_every_iteration_is_data_parallelism(ranks):
    """Means of updated parameters and updates by mean gradients are the same numbers, but rounded at different places:
    17 iterations of SGD from the same values differ by a few units in the last place of values of about 1."""
    block = {"sync": {**SYNC, "h": 1, "order": "update_first", "warmup": 0}}
    together = local.Simulation(2)
    for step in range(1, LAST + 1):
        together.backward(step, together=True)
        together.update()
    for found in ranks(_parameters, 2, block):
        for name, expected in together.models[0].state_dict().items():
            assert torch.allclose(torch.tensor(found[name]), expected, rtol=0, atol=2e-6), name


def _parameters(rank, world, block):
    job = Job(rank, world, "sgd")
    session = attach(job.host, Config.from_json(block), context(rank, world))
    for step in session.iterations(LAST):
        job.iterate(step)
    return {name: one.tolist() for name, one in job.model.state_dict().items()}


@pytest.mark.parametrize("order", ["average_first", "update_first"])
@pytest.mark.parametrize("versions", ["sync", "every"])
def test_continues_bit_for_bit(node, ranks, order, versions):
    """Left in iteration 16, after its update; synchronised whole after 7 and 14."""
    block = {"sync": {**SYNC, "order": order}}
    expected = ranks(_life, 2, block, LAST, "adam")
    node.start()
    protected = {**block, "reft": {"versions": versions}, "node_name": "n"}
    first = ranks(_life, 2, protected, LAST, "adam", node.run_dir, node.fence(), KILLED)
    second = ranks(_life, 2, protected, LAST, "adam", node.run_dir, node.fence())
    for rank in range(2):
        assert second[rank]["began"] == (RESUMED if versions == "sync" else KILLED - 1) + 1
        for life in (first[rank], second[rank]):
            for step, digest in life["digests"].items():
                assert digest == expected[rank]["digests"][step], f"rank {rank}, iteration {step}"
    assert max(second[0]["digests"]) == LAST


def test_layers_are_planned_from_what_the_job_measures(node, ranks):
    node.start()
    block = {"sync": {"policy": "dreamddp", "h": 3, "tau": 100}, "reft": {}, "node_name": "n"}
    lives = ranks(_life, 2, block, 13, "sgd", node.run_dir, node.fence())
    planned = [[event.fields for event in life["events"] if event.name == "layers.planned"] for life in lives]
    assert [len(one) for one in planned] == [1, 0], "rank 0 reports it"
    assert planned[0][0]["iteration"] == 12 and planned[0][0]["period"] == 3  # measured 1 to 9, sent behind 10 to 12
    assert planned[0][0]["reason"] == "the first profile"
    assert lives[0]["state"]["origin"] == lives[1]["state"]["origin"] == 12
    assert lives[0]["state"]["stages"] == lives[1]["state"]["stages"]
    profile = read_profile(node.run_dir / "layer-profile.json")
    assert [layer.name for layer in profile.layers] == list(LAYERS) and profile.replicas == 2
    assert all(layer.forward > 0 and layer.backward > 0 and layer.communication > 0 for layer in profile.layers)
    sizes = dict(zip(LAYERS, zip(local.SIZES, local.SIZES[1:], strict=False), strict=True))
    assert [layer.nbytes for layer in profile.layers] == [4 * (a + 1) * b for a, b in sizes.values()]


@pytest.mark.parametrize("changed", [{}, {"schedule": "equal"}, {"h": 2}], ids=["unchanged", "equal", "h"])
def test_a_measured_schedule_is_continued_with_unless_keys_were_changed(node, ranks, changed):
    """Planned after iteration 12, whose version is restored."""
    node.start()
    sync = {"policy": "dreamddp", "tau": 12}  # h: as many as there are layers
    block = {"sync": sync, "reft": {}, "node_name": "n"}
    first = ranks(_life, 2, block, LAST, "sgd", node.run_dir, node.fence(), 13)
    second = ranks(_life, 2, {**block, "sync": sync | changed}, LAST, "sgd", node.run_dir, node.fence())
    assert [life["began"] for life in second] == [13, 13]
    for before, after in zip(first, second, strict=True):
        assert before["state"]["planned"] != [None, None] and before["state"]["origin"] == 12
        if changed:
            assert after["state"]["planned"] == [None, None]
        else:
            assert after["state"] == before["state"]


def test_a_profile_that_cannot_be_written_does_not_end_training(node, ranks):
    node.start()
    (node.run_dir / "layer-profile.json").mkdir()
    block = {"sync": {"policy": "dreamddp", "tau": 100}, "reft": {}, "node_name": "n"}  # h: as many as there are layers
    lives = ranks(_life, 2, block, 13, "sgd", node.run_dir, node.fence())
    assert all(max(life["digests"]) == 13 and life["state"]["origin"] == 12 for life in lives)


def _ends_after_a_begin(rank, world):
    """Ends in order in an iteration that only one rank has begun to train."""
    job = Job(rank, world, "sgd")
    session = attach(job.host, Config.from_json({"sync": {**SYNC, "warmup": 0}}), context(rank, world))
    session.resume()
    for step in range(1, 4):
        session.iteration_begin(step)
        job.iterate(step)
        session.iteration_end(step)
    before = job.digest(moments=False)
    if rank == 0:
        session.iteration_begin(4)
    session.shutdown()
    assert job.digest(moments=False) == before
    return before


def test_an_iteration_that_was_begun_and_not_trained_is_not_averaged_at_the_end(ranks):
    assert all(ranks(_ends_after_a_begin, 2))


def _slowed(rank, world, block, run_dir, token):
    """A life with 20 ms of backward in each layer, in which averaging the last two layers takes 38 ms from iteration
    20 on: together they would end 36 ms after the backward, apart 18. On a busy machine it takes as much longer as
    averaging took before, so that it is slower than what was planned by."""
    exchange, now, longest = Synchronisation.exchange, [0], [0.0]

    def slow(self, name):
        began = time.monotonic()
        factor = exchange(self, name)
        if now[0] < SLOW_FROM:
            longest[0] = max(longest[0], time.monotonic() - began)
        elif name in ("2", "4"):
            time.sleep(0.038 + longest[0])
        return factor

    def iterate(self, step, run=Job.iterate):
        if not now[0]:
            for layer in (self.model[int(name)] for name in LAYERS):
                layer.register_full_backward_hook(lambda *given: time.sleep(0.02))
        now[0] = step
        return run(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Synchronisation, "exchange", slow)
        patch.setattr(Job, "iterate", iterate)
        return _life(rank, world, block, 60, "sgd", run_dir, token)


SLOW_FROM = 20


def test_layers_are_planned_again_when_a_period_waits_longer_than_planned(node, ranks):
    node.start()
    block = {"sync": {"policy": "dreamddp", "h": 2, "tau": 1000, "replan": 0.1}, "reft": {}, "node_name": "n"}
    lives = ranks(_slowed, 2, block, node.run_dir, node.fence())
    first, again, *_ = (event.fields for event in lives[0]["events"] if event.name == "layers.planned")
    assert first["reason"] == "the first profile" and first["iteration"] < SLOW_FROM < again["iteration"]
    assert re.fullmatch(r"a period waited \S+ s for averaging, \S+ s were planned", again["reason"])
    (turns,) = lives[0]["state"]["stages"]
    assert not any({"2", "4"} <= set(turn) for turn in turns), "they are averaged apart"
    assert lives[0]["state"]["stages"] == lives[1]["state"]["stages"]
    assert lives[0]["state"]["origin"] == lives[1]["state"]["origin"] >= again["iteration"]


def write_profile(folder, names=LAYERS):
    """A profile whose best schedule of two iterations is not that of equal numbers."""
    averaging = {"0": 1.0, "2": 3.0, "4": 9.0}
    seconds = {"forward_seconds": 1.0, "backward_seconds": 5.0}
    layers = [
        {"name": name, **seconds, "communication_seconds": averaging.get(name, 1.0), "bytes": 4} for name in names
    ]
    path = folder / "profile.json"
    path.write_text(json.dumps({"version": 1, "replicas": 2, "layers": layers}))
    return str(path)


def test_a_given_profile_is_planned_from_at_once(ranks, tmp_path):
    block = {"sync": {"policy": "dreamddp", "h": 2, "tau": TAU, "warmup": WARMUP, "profile": write_profile(tmp_path)}}
    lives = ranks(_life, 2, block, LAST)
    (sets,) = lives[0]["state"]["stages"]
    assert sets != [["4", "2"], ["0"]], "unlike equal numbers"
    expected = simulated(2, 2, False, sets=sets)
    for rank, life in enumerate(lives):
        assert life["digests"] == {step: each[rank] for step, each in expected.items()}


def _refused(rank, world, keys, last=LAST, clips=False):
    try:
        _life(rank, world, {"sync": {**SYNC, **keys}}, last, clips=clips)
    except (ConfigError, UnsupportedError, StateChangedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("keys", "last", "clips", "message"),
    [
        ({"h": 4}, LAST, False, "--sync-h 4: expected at most 3, because no pipeline stage has more than 3 lay"),
        ({"warmup": 20}, LAST, False, "--sync-warmup 20: training ends at iteration 17, before the first"),
        ({"order": "update_first"}, LAST, True, "--sync-order update_first does not allow; choose --sync-order"),
    ],
    ids=["longer than the model", "warm-up longer than the run", "clipping"],
)  # fmt: skip
def test_what_is_impossible_is_refused_in_one_line(ranks, keys, last, clips, message):
    for found in ranks(_refused, 2, keys, last, clips):
        assert message in found and "\n" not in found


def test_a_profile_of_another_model_is_refused(ranks, tmp_path):
    path = write_profile(tmp_path, ("0", "2", "4", "6"))
    for found in ranks(_given_profile, 2, path):
        assert "profile of another model: expected 3 layers, found 4 layers" in found


def test_profiles_that_differ_between_nodes_are_refused_on_all_ranks(ranks, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_profile(tmp_path)
    path = Path(write_profile(other))
    path.write_text(path.read_text().replace("9.0", "0.5"))
    for found in ranks(_given_profile, 2, "profile.json", [tmp_path, other]):
        assert found.startswith(
            "--sync-profile profile.json: rank 1 planned another schedule from it than rank 0; give"
        )


def _given_profile(rank, world, path, folders=()):
    try:
        if folders:
            os.chdir(folders[rank])
        _life(rank, world, {"sync": {"policy": "dreamddp", "h": 2, "profile": path}}, LAST)
    except ConfigError as error:
        return str(error)
    return ""
