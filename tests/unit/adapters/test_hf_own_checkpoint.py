"""Which checkpoint of its own a Trainer loads, if it was killed while it saved one."""

from types import SimpleNamespace

import pytest

from ft_plugins.adapters.hf.own_checkpoint import OwnCheckpoint, own_checkpoint
from ft_plugins.adapters.hf.trainer_run import TrainerRun
from ft_plugins.errors import ResumeError


def saved(folder, state):
    folder.mkdir()
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    return folder


def test_a_complete_checkpoint_is_loaded_and_what_is_no_folder_is_left_to_the_trainer(tmp_path):
    whole = str(saved(tmp_path / "checkpoint-8", '{"global_step": 8}'))
    for given in (whole, True, None, False, str(tmp_path / "missing")):
        assert own_checkpoint(given, lambda: whole) == OwnCheckpoint(given)
    assert own_checkpoint(True, lambda: None) == OwnCheckpoint(True)


@pytest.mark.parametrize("state", [None, "", '{"global_step": '])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_checkpoint_that_was_not_saved_to_its_end_is_not_loaded(tmp_path, state, by_name):
    cut = str(saved(tmp_path / "checkpoint-8", state))
    own = own_checkpoint(cut if by_name else True, lambda: cut)
    assert own.load is None
    assert own.incomplete.startswith(f"{cut} was not saved to its end (trainer_state.json: ")


class Run(TrainerRun):
    def __init__(self, restored):
        self._incomplete, self._restored = "checkpoint-8 was not saved to its end", restored
        self.trainer = SimpleNamespace(state=SimpleNamespace(global_step=7), is_world_process_zero=lambda: True)


def test_it_is_refused_unless_a_version_of_this_job_takes_its_place(capsys):
    with pytest.raises(ResumeError, match=r"checkpoint-8 was not saved to its end, and nothing newer .*: remove it"):
        Run(None)._require_restored()
    Run({})._require_restored()
    assert "saved to its end: it is not loaded; iteration 7 was restored" in capsys.readouterr().out
