"""What the loop of a DeepSpeed script is told of its reads: the position is put in place where training reads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from ft_plugins.adapters.deepspeed import training  # noqa: E402
from ft_plugins.adapters.deepspeed.training import DeepSpeedLoop, EngineHooks  # noqa: E402
from ft_plugins.config import Config  # noqa: E402
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
        one, look, trained = loop(restored), Source(), Source()
        one._require_training_data(look)
        one._require_training_data(look)
        if dropped:
            del look
        else:
            look.ended = True
        if restored:
            with pytest.raises(ResumeError, match="read them before deepspeed.initialize"):
                one._require_training_data(trained)
        else:
            one._require_training_data(trained)
            assert "were not trained on" in capsys.readouterr().out


def test_loaders_that_are_read_together_and_epochs_that_follow_are_training() -> None:
    one, left, right = loop(True), Source(), Source()
    one._require_training_data(left)
    one._require_training_data(right)
    one._forward = True
    left.ended = True
    one._require_training_data(Source())


def test_a_rank_leaves_once_with_whether_it_ended_in_order() -> None:
    left: list[bool] = []
    for fails in (False, True):
        one = loop(False)
        one._leave, one._updated = left.append, None

        def shutdown(fails: bool = fails) -> None:
            if fails:
                raise ResumeError("at the end")

        one._session = SimpleNamespace(shutdown=shutdown)
        for _ in range(2):
            try:
                one.shutdown()
            except ResumeError:
                assert fails
    assert left == [True, False]


@pytest.mark.parametrize("where", ["__init__", "resume"])
def test_a_rank_that_joined_leaves_if_protection_does_not_start(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []

    def fail(*args: Any) -> None:
        raise ResumeError("at the start")

    def join(config: Config, context: Any) -> tuple[Any, Callable[[bool], None]]:
        return context, left.append

    made = type("Loop", (), {"__init__": lambda *args: None, "resume": lambda self: None, where: fail})
    monkeypatch.setattr(training, "DeepSpeedLoop", made)
    monkeypatch.setattr(training, "require_several_ranks", lambda: None)
    monkeypatch.setattr(training, "launch_context", lambda: SimpleNamespace(config=Config(), run_dir=None))
    settings = {"ft_plugins": {"reft": {}}}
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=settings))
    with pytest.raises(ResumeError):
        EngineHooks(join)._initializing(lambda config=None: (engine,))(config=settings)
    assert left == [False]
