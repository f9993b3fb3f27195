"""Forwards of a model, and what saves checkpoints, as phases of progress."""

import copy
import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from ft_plugins.adapters.forward_edges import Saving, follow_forwards
from ft_plugins.model.progress import WorkPhase

INPUT = torch.ones(1, 2)


class Recorded:
    """Records the edges."""

    def __init__(self):
        self.phases = []
        self.words = threading.Lock()  # can be neither copied nor pickled

    def edge(self, phase):
        self.phases.append(phase)

    def shares_forward(self):
        pass


def followed(progress, **more):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    follow_forwards([model], progress, **more)
    return model


def test_a_forward_in_training_has_two_edges_and_one_without_gradients_is_an_evaluation():
    progress = Recorded()
    model = followed(progress)
    model(INPUT)
    assert progress.phases == [WorkPhase.FORWARD, WorkPhase.AFTER_FORWARD]
    with torch.no_grad():
        model(INPUT)
    assert progress.phases[2:] == [WorkPhase.EVALUATION], "which lasts"


def test_where_spans_are_followed_only_evaluations_are_reported():
    progress = Recorded()
    model = followed(progress, evaluations_only=True)
    model(INPUT)
    with torch.inference_mode():
        model(INPUT)
    assert progress.phases == [WorkPhase.EVALUATION]


def test_copies_of_a_model_report_nothing():
    progress = Recorded()
    model = followed(progress)
    copy.deepcopy(model)(INPUT)
    pickle.loads(pickle.dumps(model))(INPUT)  # noqa: S301
    assert progress.phases == []


def test_what_torch_compile_traces_is_one_graph_and_not_seen(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    progress = Recorded()
    followed(progress)(INPUT)
    assert progress.phases == []


def test_a_scripted_module_is_left_alone():
    progress = Recorded()
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    follow_forwards([scripted], progress)
    scripted(INPUT)
    assert progress.phases == []


def test_saving_is_a_phase_of_the_training_thread_alone():
    progress = Recorded()
    called = []
    owner = SimpleNamespace(save=lambda *args, **kwargs: called.append((args, kwargs)) or "saved", other=1)
    saving = Saving(progress)
    saving.follow(owner, ("save", "other", "absent"))
    assert owner.save(1, to=2) == "saved" and called == [((1,), {"to": 2})]
    assert progress.phases == [WorkPhase.SAVING, WorkPhase.AFTER_UPDATE] and owner.other == 1
    thread = threading.Thread(target=owner.save)
    thread.start()
    thread.join()
    assert len(called) == 2 and len(progress.phases) == 2
    saving.follow(None, ("save",))


def test_saving_that_saves_by_another_followed_function_ends_with_the_outer_one():
    """torch.distributed.checkpoint.save calls torch.save for each tensor, and then waits for the disk."""
    progress = Recorded()
    inner = SimpleNamespace(save=lambda: None)
    outer = SimpleNamespace(save=lambda: [inner.save(), inner.save(), progress.phases.append(WorkPhase.STARTING)])
    saving = Saving(progress)
    saving.follow(inner, ("save",))
    saving.follow(outer, ("save",))
    outer.save()
    assert progress.phases == [WorkPhase.SAVING, WorkPhase.STARTING, WorkPhase.AFTER_UPDATE]
    inner.save()
    assert progress.phases[3:] == [WorkPhase.SAVING, WorkPhase.AFTER_UPDATE]


@pytest.mark.parametrize("known", [True, False], ids=["followed", "imported-by-name"])
def test_a_checkpoint_of_torch_is_a_save_until_it_is_on_the_disk(tmp_path, monkeypatch, known):
    """Its files are synchronised after the last tensor, which takes minutes where storage is slow."""
    for owner in (torch, checkpoint):
        monkeypatch.setattr(owner, "save", owner.save)
    progress, save = Recorded(), checkpoint.save
    during = []
    saving = Saving(progress)
    saving.follow(torch, ("save",))
    if known:
        saving.follow(checkpoint, ("save",))
        save = checkpoint.save
    monkeypatch.setattr(os, "fsync", lambda descriptor: during.append(progress.phases[-1]))
    save({"one": torch.ones(3), "two": torch.ones(4)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert set(during) == {WorkPhase.SAVING}
    assert (progress.phases[-1] is WorkPhase.AFTER_UPDATE) == known


def test_an_error_while_saving_ends_the_phase_and_passes():
    progress = Recorded()

    def save():
        raise OSError("full")

    owner = SimpleNamespace(save=save)
    Saving(progress).follow(owner, ("save",))
    with pytest.raises(OSError, match="full"):
        owner.save()
    assert progress.phases == [WorkPhase.SAVING, WorkPhase.AFTER_UPDATE]
