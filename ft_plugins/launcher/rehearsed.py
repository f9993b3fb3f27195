"""Whether a job's command was rehearsed: what a rehearsal that was exact leaves, and what a start writes down.

The same command has the same script, with the same content, the same words and flags, under the same version of
ft_plugins; names, nodes and folders to save to may be others.

Invariant: what is remembered is advice. A file that is missing or damaged means that nothing was rehearsed.

In: a parsed command line. Out: one file among this user's run directories; a sentence.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import time
from contextlib import suppress
from pathlib import Path

import xxhash
from pydantic import TypeAdapter

from ..base import files
from ..base.intake import Text, read_json
from ..config import Config, run_root

OURS = ("--ftp-job", "--ftp-node-name", "--ftp-resume", "--ftp-transcript-dir", "--ftp-stop-after")  # set by rehearsals
STORAGE = "--reft-checkpoint-dir"
# flags by which scripts name a folder to save to
SAVES = re.compile(
    r"--(save|(save|output|out|ckpt|checkpoints?)[-_](dir|path|folder)|(save|checkpoint)[-_]to)"
).fullmatch
_FILE, _MOST = "rehearsed.json", 256  # among the run directories; commands in it
_KNOWN = TypeAdapter(dict[Text, Text])


def digest_of(config: Config, options: argparse.Namespace) -> str:
    """Of a command, by its flags of ours and by torchrun's `options`, script and its words among them."""
    words, skip = list[str](), False
    for word in options.training_script_args:
        name, equals, _ = word.partition("=")
        if not skip and not SAVES(name):
            words.append(word)
        skip = bool(SAVES(name)) and not equals
    flags = sorted(flag for flag in config.flags() if flag.partition("=")[0] not in (*OURS, STORAGE, "--ftp-faults"))
    content = b""
    with suppress(OSError):  # a module
        content = Path(options.training_script).read_bytes()
    script = Path(options.training_script).name
    version = importlib.metadata.version("ft_plugins")
    digest = xxhash.xxh3_64(repr((version, script, words, flags)).encode(errors="surrogateescape"))
    digest.update(content)
    return digest.hexdigest()


def remember(digest: str, sentence: str) -> None:
    """The command was rehearsed, with this outcome."""
    known = _known()
    known.pop(digest, None)
    known[digest] = f"rehearsed {time.strftime('%Y-%m-%d')}, {sentence}"
    with suppress(OSError):
        files.write_json(run_root() / _FILE, dict([*known.items()][-_MOST:]))


def said(digest: str) -> str:
    """Whether the command was rehearsed, and how it is, in one sentence. Not its words: they may hold secrets."""
    return _known().get(digest, "not rehearsed: put `ft-plugins rehearse --` before this command, on one node")


def _known() -> dict[str, str]:
    try:
        return read_json(run_root() / _FILE, _KNOWN)
    except (OSError, ValueError):
        return {}
