"""Parse a command line or a JSON block into values by key. An unknown flag or key is an error with a suggestion.

Invariant: nothing is guessed. Words that are not ours are returned unchanged and in order; a flag without a value never
takes the next option for it; a key that is given twice has one value.

A word is taken for a misspelt name of ours only if it has the same letters, apart from dashes and case, some of them
doubled or two neighbours swapped: a script's own `--reset`, `--draft` or `--async` never is. What only resembles a name
is for a hint.

In: words or a mapping, and the keys of the schema. Out: `{path: value}`, a system's own path holding True or False.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..base.intake import SHOWN, shown
from ..errors import ConfigError
from .keys import Key, KeyPath

Values = dict[KeyPath, Any]
_FLAG = re.compile(r"[-\u2010-\u2015\u2212]+([A-Za-z][\w-]*)")  # also with the dashes of a word processor
_SHORTEST = 6  # letters of a name whose dashes may be left out: '--synch' is a word


def read_block(block: Any, keys: Sequence[Key], root: str) -> Values:
    """The values of a JSON block named `root`, not yet checked against types and ranges. Raises ConfigError."""
    if not isinstance(block, Mapping):
        raise ConfigError(f"{root}: expected an object, found {shown(block)}")
    known = {key.path: key for key in keys}
    values: Values = {}
    for name, value in block.items():
        key = known.get((name,)) or _unknown_name((str(name),), keys, root)
        if not key.system:
            values[key.path] = value
        elif value is None or isinstance(value, bool):
            values[key.path] = bool(value)
        elif isinstance(value, Mapping):
            values[key.path] = True
            for sub, inner in value.items():
                values[(known.get((name, sub)) or _unknown_name((name, str(sub)), keys, root)).path] = inner
        else:
            raise ConfigError(f"{root}.{name}: expected {key.expected}, found {shown(value)}")
    return values


def read_flags(argv: Sequence[str], keys: Sequence[Key], general: str) -> tuple[Values, list[str]]:
    """The values on a command line, each checked, and the words that are not ours. Raises ConfigError."""
    known = {key.flag: key for key in keys}
    ours = _namespace(keys, general)
    values: Values = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        name, equals, text = words[0].partition("=")
        if not ours.fullmatch(name):
            rest.append(words.pop(0))
            continue
        words.pop(0)
        key = known.get(name) or _unknown_flag(name, known)
        value: Any = True
        if key.switch and equals:
            raise ConfigError(f"{name}: expected no value, found {shown(text)}")
        if not key.switch:
            if not equals:
                if not words or _is_option(words[0]):
                    found = shown(words[0]) if words else "nothing"
                    raise ConfigError(f"{name}: expected {key.expected}, found {found}")
                text = words.pop(0)
            value = key.read(text)
        if values.setdefault(key.path, value) != value:
            raise ConfigError(f"{name}: given as {key.shown(values[key.path])} and as {key.shown(value)}; give it once")
    return values, rest


def add_flags(parser: argparse.ArgumentParser, keys: Sequence[Key]) -> None:
    """Add a flag for every key to `parser`; None in the namespace unless given."""
    parser.allow_abbrev = False
    group = parser.add_argument_group("ft_plugins", "fault tolerance")
    for key in keys:
        if key.switch:
            text = key.meaning.replace("%", "%%")
            group.add_argument(key.flag, dest=key.dest, action="store_true", default=None, help=text)
        else:
            facts = f"{key.expected}; {f'in {key.unit}; ' if key.unit else ''}default: {key.shown(key.default)}"
            text = f"{key.meaning} ({facts})".replace("%", "%%")
            word = key.path[-1].upper()
            group.add_argument(key.flag, dest=key.dest, type=_argument_type(key), default=None, metavar=word, help=text)


def _argument_type(key: Key) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return key.read(text)
        except ConfigError as error:  # argparse itself names the flag
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{key.flag}: ")) from error

    return read


def _namespace(keys: Sequence[Key], general: str) -> re.Pattern[str]:
    """The names that are reserved for our flags: `--ftp-...`, `--<system>`, `--<system>-...`, also with underscores."""
    systems = "|".join(re.escape(key.path[0]) for key in keys if key.system)
    return re.compile(rf"--({systems}|({general}|{systems})[-_][\w-]*)")


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[\d.].*", word)


def _unknown_flag(name: str, known: Mapping[str, Key]) -> Key:
    """Raise for an unknown flag of ours, with the nearest known one; their common prefix is not compared."""
    if len(name) > SHOWN:  # longer than any known flag
        raise ConfigError(f"{shown(name)[1:-1]}: unknown flag")
    start = re.match(r"--[^-_]+[-_]?", name)
    prefix = start.group().replace("_", "-") if start else ""
    siblings = {flag.removeprefix(prefix): flag for flag in known if flag.startswith(prefix)}
    near = difflib.get_close_matches(name.replace("_", "-").removeprefix(prefix), siblings, 1, 0.6)
    hint = f"did you mean {siblings[near[0]]}?" if near else "known: " + " ".join(siblings.values())
    raise ConfigError(f"{name}: unknown flag; {hint}")


def _unknown_name(path: KeyPath, keys: Sequence[Key], root: str) -> Key:
    """Raise for an unknown name, with the nearest known one: in the same block first, then anywhere."""
    siblings = {key.path[-1]: key.name for key in keys if key.path[:-1] == path[:-1]}
    anywhere = {key.path[-1]: key.name for key in keys}
    named = ".".join([root, *path[:-1], shown(path[-1])[1:-1]])
    spelt = path[-1][:SHOWN].lower().replace("-", "_")
    exact = siblings.get(spelt) or anywhere.get(spelt)
    near = difflib.get_close_matches(spelt, siblings, 1, 0.6) or difflib.get_close_matches(spelt, anywhere, 1, 0.6)
    meant = exact or (anywhere | siblings)[near[0]] if exact or near else ""
    hint = f"did you mean {root}.{meant}?" if meant else "known: " + ", ".join(siblings)
    raise ConfigError(f"{named}: unknown key; {hint}")


# ---- misspelt names ----


def meant_flag(word: str, keys: Sequence[Key]) -> str:
    """The flag of ours that an unknown word of a command line was meant for; '' if it was meant for none."""
    found = _FLAG.fullmatch(word.partition("=")[0])
    if not found:
        return ""
    name = found[1].lower().replace("_", "-").rstrip("-")
    letters = {key.flag: key.flag.replace("-", "") for key in keys}
    for key in keys:
        if name.replace("-", "") == letters[key.flag] and (key.system or len(letters[key.flag]) >= _SHORTEST):
            return key.flag
    head, _, rest = name.partition("-")
    for prefix in dict.fromkeys(key.flag.split("-")[2] for key in keys):
        if not is_typo(head, prefix):
            continue
        flags = [key.flag for key in keys if key.flag.startswith(f"--{prefix}-" if rest else f"--{prefix}")]
        near = difflib.get_close_matches(f"--{prefix}-{rest}", flags, 1, 0.8) if rest else [f"--{prefix}"]
        if near and near[0] in flags:
            return near[0]
    return ""


def is_typo(word: str, name: str) -> bool:
    """Whether `word` is `name` with letters doubled, or with two neighbours swapped."""
    swapped = (name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in range(len(name) - 1))
    return word != name and (re.sub(r"(.)\1+", r"\1", word) == name or word in swapped)


def resembling(words: Iterable[str], keys: Sequence[Key]) -> tuple[str, str] | None:
    """A flag among `words` that resembles a switch of ours, and that switch; for a hint."""
    for word in words:
        if (found := _FLAG.fullmatch(word.partition("=")[0])) and (
            near := difflib.get_close_matches(found[1].lower(), [key.path[0] for key in keys if key.system], 1, 0.75)
        ):
            return word, f"--{near[0]}"
    return None
