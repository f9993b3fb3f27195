"""What the loop of a DeepSpeed script is told of its reads: the position is put in place where training reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed.training import DeepSpeedLoop  # noqa: E402
from ft_plugins.errors import ResumeError  # noqa: E402


class Source:
    """Something that is read; `ended` as of a `LoaderPass`."""

    ended = False


def loop(restored: bool) -> Any:
    found: Any = DeepSpeedLoop.__new__(DeepSpeedLoop)
    found._said, found._first, found._forward = set(), None, False
    found._host = SimpleNamespace(rank=0, restored=restored)
    return found


@pytest.mark.parametrize("dropped", [True, False])
def test_a_look_at_the_data_before_training_is_no_training(dropped: bool, capsys: pytest.CaptureFixture[str]) -> None:
    for restored in (False, True):
        one, look, training = loop(restored), Source(), Source()
        one._require_training_data(look)
        one._require_training_data(look)
        if dropped:
            del look
        else:
            look.ended = True
        if restored:
            with pytest.raises(ResumeError, match="read them before deepspeed.initialize"):
                one._require_training_data(training)
        else:
            one._require_training_data(training)
            assert "were not trained on" in capsys.readouterr().out


def test_loaders_that_are_read_together_and_epochs_that_follow_are_training() -> None:
    one, left, right = loop(True), Source(), Source()
    one._require_training_data(left)
    one._require_training_data(right)
    one._forward = True
    left.ended = True
    one._require_training_data(Source())
