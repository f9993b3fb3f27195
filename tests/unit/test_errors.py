"""What a message of an error may look like."""

from __future__ import annotations

import pytest

from ft_plugins.errors import ConfigError


@pytest.mark.parametrize(
    "value", ["/" + "long/" * 1000, "host:" + "9" * 5000, "one two " * 1000], ids=["path", "port", "text"]
)
def test_a_quoted_value_of_any_length_leaves_a_message_that_can_be_read_with_its_remedy(value: str) -> None:
    said = str(ConfigError(f"--ftp-x: found {value}; give another one"))
    assert said.startswith(f"--ftp-x: found {value[:150]}") and said.endswith("; give another one")
    assert len(said) < 4100 and "more ...]" in said
    if " " not in value:
        assert len(said) < 400


def test_a_message_of_usual_length_is_left_alone() -> None:
    said = f"{'a' * 200} is not {'b ' * 900}: do this"
    assert str(ConfigError(said)) == said
