"""Transcripts: commands to a pure machine and what came out, in text files that read like a session.

    # What this case shows
    > command word name=value
    what came out

A word is a number, a version (`lineage:iteration`), a tuple (`a,b`), `yes`, `no`, `-` for None, or a text, in quotes if
it has blanks. Each case has a machine of its own; a command is one of its methods. `python -m pytest -n 0 FILE
--rewrite` writes what comes out now, so that a change shows as a difference.
"""

import dataclasses
import enum
import re
import shlex
from pathlib import Path

import pytest

from ft_plugins.errors import FtError
from ft_plugins.events import EventType
from ft_plugins.snapshot.segment.slots import Version

CONSTANTS = {"-": None, "yes": True, "no": False}


def value(word):
    """What a word of a command means."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    if re.fullmatch(r"\d+:\d+", word):
        return Version(*map(int, word.split(":")))
    if "," in word and " " not in word:
        return tuple(value(part) for part in word.split(",") if part)
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def shown(found):
    """A value as text: of a dataclass, the fields that are not the default ones."""
    if isinstance(found, Version):
        return f"{found.lineage}:{found.iteration}"
    if isinstance(found, EventType):
        return found.name
    if isinstance(found, enum.Enum):
        return found.name.lower().replace("_", " ") if found.name else "none"
    if isinstance(found, dict):
        return ", ".join(f"{shown(key)} {shown(of)}" for key, of in found.items()) or "none"
    if isinstance(found, (list, tuple, set, frozenset)):
        return " ".join(map(shown, sorted(found) if isinstance(found, (set, frozenset)) else found)) or "none"
    if dataclasses.is_dataclass(found):
        fields = [(one, getattr(found, one.name)) for one in dataclasses.fields(found)]
        said = [f"{one.name}={shown(of)}" for one, of in fields if of != one.default]
        return " ".join([type(found).__name__, *said])
    return next((word for word, of in CONSTANTS.items() if of is found), str(found))


def play(machine, lines):
    """The lines of a case, with what comes out of a new machine."""
    said, actor = [], machine()
    for line in lines:
        if line.startswith("> "):
            name, *words = shlex.split(line[2:])
            named = dict(word.split("=", 1) for word in words if re.match(r"[a-z_]+=", word))
            given = [value(word) for word in words if not re.match(r"[a-z_]+=", word)]
            try:
                found = getattr(actor, name)(*given, **{key: value(word) for key, word in named.items()})
            except (FtError, ValueError) as error:
                found = f"{type(error).__name__}: {error}"
            said += [line, *([] if found is None else (found if isinstance(found, str) else shown(found)).splitlines())]
        elif line.startswith("#"):
            said.append(line)
    return said


def of(file, machine):
    """The test of all cases in a file beside `__file__` of a test."""
    path = Path(file).with_name(f"{Path(file).stem.removeprefix('test_')}.txt")
    cases = [part.strip().splitlines() for part in re.split(r"\n\n+(?=#)", path.read_text())]

    @pytest.mark.parametrize("case", cases, ids=lambda case: case[0].strip("# ").replace(" ", "_"))
    def transcript(case, pytestconfig):
        found = play(machine, case)
        if pytestconfig.getoption("rewrite"):
            path.write_text(path.read_text().replace("\n".join(case), "\n".join(found)))
        else:
            assert found == case

    return transcript
