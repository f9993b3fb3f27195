"""What a message of an error may look like."""

import ast
import re
from pathlib import Path

import pytest

import ft_plugins
from ft_plugins.errors import ConfigError


@pytest.mark.parametrize(
    "value", ["/" + "long/" * 1000, "host:" + "9" * 5000, "one two " * 1000], ids=["path", "port", "text"]
)
def test_a_quoted_value_of_any_length_leaves_a_message_that_can_be_read_with_its_remedy(value):
    said = str(ConfigError(f"--ftp-x: found {value}; give another one"))
    assert said.startswith(f"--ftp-x: found {value[:150]}") and said.endswith("; give another one")
    assert len(said) < 4100 and "more ...]" in said
    if " " not in value:
        assert len(said) < 400


def test_a_message_of_usual_length_is_left_alone():
    said = f"{'a' * 200} is not {'b ' * 900}: do this"
    assert str(ConfigError(said)) == said


# what a person gives or reads before a job begins; elsewhere a message may be a part of another one
KINDS = ("ConfigError", "TopologyError", "UnsupportedError")
ASKED = "cli config launcher model".split()
REMEDIES = re.compile(
    r"\b(add|allow|call|choose|did you mean|drop|end|expected|fewer|free|give|known|leave out|lower|make|move|name|need"
    r"|needs|pass|put|remove|rename|run|set|start|take|use|write)\b|knows \{|devices are|rehearse|repeat"
)
NOT_OF_A_PERSON = {"no system is on": "a caller's mistake", "is not in this job of": "a caller's mistake"}


def messages():
    """Place and text of each refusal in these folders; values are in braces."""
    root = Path(ft_plugins.__file__).parent
    for path in sorted(path for name in ASKED for path in (root / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            error = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(error, ast.Call) and error.args and ast.unparse(error.func) in KINDS:
                yield f"{path.relative_to(root)}:{error.lineno}", ast.unparse(error.args[0])


def test_each_refusal_before_a_job_names_what_to_do():
    found = dict(messages())
    assert len(found) > 60
    passed_on = re.compile(r"\{(error|reason|hint|remedy)\}|complaint\(|_in_the_way\(|^[a-z_.]+$")
    lacking = {
        place: text
        for place, text in found.items()
        if not REMEDIES.search(text) and not passed_on.search(text) and not any(one in text for one in NOT_OF_A_PERSON)
    }
    assert lacking == {}
