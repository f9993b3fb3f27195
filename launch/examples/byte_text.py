"""Real text as bytes, and a sampler whose position determines the next windows.

Invariant: the windows that a rank reads depend only on (text, seed, position), so a restored position continues the
same order. In: a file, or the sources of Python's standard library, which every machine has. Out: micro-batches of
`sequence + 1` consecutive bytes.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ft_plugins.errors import ConfigError

VOCABULARY = 256
STANDARD_LIBRARY_BYTES = 4 << 20
_FINGERPRINT_BYTES = 1 << 20


@dataclass(frozen=True)
class Text:
    """Bytes to learn from. `origin`: where they come from."""

    origin: str
    content: npt.NDArray[np.uint8]

    @classmethod
    def read(cls, path: str | None) -> Text:
        """The file at `path`, or the first 4 MiB of the standard library's modules, sorted by name.

        Raises ConfigError for a file that is missing or empty.
        """
        if path is None:
            folder = Path(sysconfig.get_path("stdlib"))
            content = bytearray()
            for source in sorted(folder.glob("*.py")):
                content += source.read_bytes()
                if len(content) >= STANDARD_LIBRARY_BYTES:
                    break
            return cls(f"{folder}/*.py", np.frombuffer(bytes(content[:STANDARD_LIBRARY_BYTES]), dtype=np.uint8))
        if not Path(path).is_file():
            raise ConfigError(f"--data {path}: no such file; name a text file, or omit it for the standard library")
        if Path(path).stat().st_size == 0:
            raise ConfigError(f"--data {path}: the file is empty; name one that contains text")
        return cls(path, np.memmap(path, dtype=np.uint8, mode="r"))

    def fingerprint(self) -> dict[str, Any]:
        """Origin, size, and a digest of the first MiB."""
        first = np.ascontiguousarray(self.content[:_FINGERPRINT_BYTES])
        return {"path": self.origin, "bytes": len(self.content), "xxh3": xxhash.xxh3_64_hexdigest(first)}

    def split(self, valid: float, sequence: int) -> tuple[Text, Text]:
        """Training part and validation part, which is the end. Raises ConfigError if either has less than a window."""
        cut = int(len(self.content) * (1 - valid))
        parts = Text(self.origin, self.content[:cut]), Text(self.origin, self.content[cut:])
        if min(len(part.content) for part in parts) <= sequence:
            raise ConfigError(
                f"{self.origin}: {len(self.content)} bytes are too few for windows of {sequence + 1}; use a longer text"
            )
        return parts


class Sampler:
    """An endless iterator over micro-batches of windows, reshuffled every epoch.

    `position`: samples consumed by all replicas together. Replica r takes samples position + r*b .. position + (r+1)*b
    of each micro-batch of size b.
    """

    def __init__(self, text: Text, *, seed: int, sequence: int, micro_batch: int, replica: int, replicas: int) -> None:
        self.position = 0
        self._text, self._seed, self._sequence = text.content, seed, sequence
        self._micro_batch, self._replica, self._replicas = micro_batch, replica, replicas
        self._windows = (len(text.content) - 1) // sequence

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, (micro_batch, sequence) int64 each."""
        first = self.position + self._replica * self._micro_batch
        windows = np.stack([self._window(first + index) for index in range(self._micro_batch)])
        self.position += self._replicas * self._micro_batch
        batch = torch.from_numpy(windows.astype(np.int64))
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        """The data position, for DeepSpeed jobs; Megatron's example saves `position` itself."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the data position."""
        self.position = state["position"]

    def skip(self, micro_batches: int) -> None:
        """Skip micro-batches without reading them."""
        self.position += micro_batches * self._replicas * self._micro_batch

    def _window(self, sample: int) -> npt.NDArray[np.uint8]:
        epoch, index = divmod(sample, self._windows)
        start = int(_order(self._windows, self._seed, epoch)[index]) * self._sequence
        return self._text[start : start + self._sequence + 1]


@lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The windows in the order of an epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(windows)
