"""The exception tree. Every message names what was expected, what was found and what to do.

`EXIT_REFUSED` is the exit status of a worker that ended with an `FtError` that a restart cannot cure; the agent does
not restart after it. `EXIT_DRAINED` is that of an ft-run that has left a job which goes on.
"""

import re

EXIT_REFUSED = 78  # EX_CONFIG of sysexits.h
# Not 0, else who started it would take the whole job for complete; and more than any signal's (128 + 64), because from
# 128 on a PyTorchJob starts the pod again, and fails the job below.
EXIT_DRAINED = 199
_WORD, _MESSAGE = 300, 4000  # characters of a word and of a message that are shown


class FtError(Exception):
    """Base of all errors raised on purpose by this package.

    `echo` marks an error that another rank reports, so this one ends without printing it. A message may quote outside
    input; `str` escapes every character that a terminal could interpret or an encoder reject.
    """

    def __init__(self, *args: object, echo: bool = False) -> None:
        super().__init__(*args)
        self.echo = echo

    def __str__(self) -> str:
        return bounded(printable(super().__str__()))


class ConfigError(FtError):
    """A key is unknown, misspelt, ineffective or contradicts another."""


class TopologyError(FtError):
    """Parallel sizes, order or nodes that cannot be laid out."""


class InventoryError(FtError):
    """Training state that cannot be captured, or that does not match what was captured."""


class StateChangedError(InventoryError):
    """The loop added, removed or replaced training state after it was protected; the loop must be changed."""


class BudgetError(FtError):
    """Not enough memory for protection."""


class SegmentError(FtError):
    """A segment of shared memory is not what its reader expects."""


class CorruptSlotError(SegmentError):
    """Bytes do not match the digest taken when they were captured."""


class CorruptHeaderError(SegmentError):
    """The header of a segment does not match its digest."""


class FencedError(FtError):
    """This incarnation has been superseded by a newer one and may not write any more."""


class ProtocolError(FtError):
    """A peer sent something malformed, or did not answer in time."""


class ProtectionError(FtError):
    """Protection is required but not available."""


class ResumeError(FtError):
    """Captured state does not belong to this job as it is now."""


class LoopError(ResumeError):
    """The loop did not continue where the restored state is: the script must be changed."""


class StorageError(FtError):
    """A checkpoint in storage is damaged, or not what its reader expects."""


class BusyError(FtError):
    """Another ft-run owns this job on this node."""


class ReplicaError(FtError):
    """Replicas are mismatched or non-finite, and the job must return to an earlier version."""


class NodeError(FtError):
    """A node failed the site's own check (`--ftp-node-check`), so it takes no part in the job."""


class UnsupportedError(FtError):
    """A framework feature that is not supported, by name."""


class PatchError(FtError):
    """A patch of an upstream framework no longer applies."""


def bounded(text: str) -> str:
    """`text` without the middle of very long words, such as a path or an endpoint that it quotes, and of all of it."""
    words = re.sub(rf"\S{{{_WORD},}}", lambda word: _cut(word[0], _WORD), text)
    return _cut(words, _MESSAGE) if len(words) > _MESSAGE else words


def _cut(text: str, length: int) -> str:
    """Two thirds of `length` from the begin, and one third from the end, where a message says what to do."""
    left = len(text) - length
    return f"{text[: 2 * length // 3]}[... {left} more ...]{text[-(length // 3) :]}"


def printable(text: str) -> str:
    """`text` with escape codes, lone surrogates and the like escaped, as in a Python string."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark in "\n\t" else repr(mark)[1:-1] for mark in text)
