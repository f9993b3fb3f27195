"""The package speaks the field's language: words of a private dialect occur in no docstring, comment or message."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ft_plugins", "launch", "benchmarks", "patches")
# what to write instead: docs/glossary.md, and CONTRIBUTING.md
BANNED = re.compile(
    r"\b(?:tells?|told|telling|nobody|whoever|whatever it was|beside|alike|anew|likewise|of late|aside|knocked"
    r"|vaults?|heartbeats? beat|directives?|drifting|beats?|"
    r"is no (?:request|number|host|checkpoint|index)|that is no|what counts|counts (?:for|on|as)|version counts"
    r"|none is starved|starved by|who waits|who speaks|goes what|goes only what|has it that)\b",
    re.IGNORECASE,
)


def texts(source):
    """Comments, docstrings and string literals, with the line that each begins in."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def dialect(path):
    """Where banned words stand in a file: 'file:line: word'."""
    found = []
    for line, text in texts(path.read_text()):
        for match in BANNED.finditer(text):
            at = line + text.count("\n", 0, match.start())
            found.append(f"{path.relative_to(ROOT)}:{at}: '{match.group()}'")
    return found


def files():
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())


def test_no_word_of_a_private_dialect_is_used():
    found = [line for path in files() for line in dialect(path)]
    assert not found, f"{len(found)} places, see docs/glossary.md for the words to use:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text", ['"""Whoever waits is told."""', "x = 1  # nobody knows", 'say("rank 3 and 4 alike")', 'f"{x} beside {y}"']
)
def test_such_words_are_found_wherever_people_read_them(tmp_path, text):
    assert any(BANNED.search(content) for _, content in texts(text))
    assert not any(BANNED.search(content) for _, content in texts("told = alike(beside)"))
