"""Find what was meant for one of our names and is misspelt, so that a job is not unprotected by a typing error. Pure.

Invariant: strict. A word is meant for a name of ours only if it has the same letters, apart from dashes and case, some
of them doubled or two neighbours swapped: a script's own `--reset`, `--draft` or `--async` never is. What only
resembles a name is for a hint.

In: words of a command line, keys of a JSON file. Out: the name that was meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from .keys import Key

_FLAG = re.compile(r"[-\u2010-\u2015\u2212]+([A-Za-z][\w-]*)")  # also with the dashes of a word processor
_SHORTEST = 6  # letters of a name whose dashes may be left out: '--synch' is a word


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
