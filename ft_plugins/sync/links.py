"""The collectives of audits, averagings and synchronisations: within a replica set, and over the whole job.

Invariant: they use groups of their own, so they never mix with training's collectives; all ranks call in the same
order. Payloads are sent as bytes, so any dtype passes unconverted. Results are in rank order, so every rank computes
the same bits from them.

In: a process group for each replica set of this rank, and one of all ranks. Out: tensors of all members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from .averaging.averaging_times import Table

Ranks = tuple[int, ...]


class Links:
    """One rank's end of the collectives."""

    def __init__(
        self, rank: int, groups: Mapping[Ranks, dist.ProcessGroup], job: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """`groups` by the ascending ranks of a set; a rank alone needs none. `job`: the group of `gather_job`; None for
        this rank alone. `device`: that of the tensors to send."""
        self.rank = rank
        self.device = device
        self._groups = dict(groups)
        self._job = job

    def gather_job(self, row: Sequence[float]) -> Table:
        """Gather a row of numbers from all ranks of `job`: (ranks, len(row)) float64."""
        own = torch.tensor(row, dtype=torch.float64, device=self.device)
        if self._job is None:
            return own.unsqueeze(0).cpu().numpy()
        return self._gather(self._job, own).cpu().numpy()

    def all_gather(self, replicas: Ranks, own: torch.Tensor) -> torch.Tensor:
        """Gather a tensor from each member: (M, ...), in rank order."""
        return own.unsqueeze(0) if len(replicas) == 1 else self._gather(self._groups[replicas], own)

    def _gather(self, group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
        """On processors every member sends to every other one at once: gloo's own gather is a ring, which takes M - 1
        steps one after another, each with a process to be woken."""
        gathered = torch.empty((group.size(), *own.shape), dtype=own.dtype, device=own.device)
        if self.device.type == "cpu":
            dist.all_to_all_single(_bytes(gathered), _bytes(own.expand_as(gathered).contiguous()), group=group)
        else:
            dist.all_gather([_bytes(part) for part in gathered], _bytes(own.contiguous()), group=group)
        return gathered

    def all_gather_with(
        self, replicas: Ranks, own: torch.Tensor, number: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`all_gather` of a flat tensor and of one float64 in the same message: (M, n), and (M,) float64."""
        gathered = self.all_gather(replicas, torch.cat([_bytes(own.contiguous()), _bytes(number)]))
        return _split(gathered, own.nbytes, own.dtype)

    def gather_bytes(self, replicas: Ranks, payload: bytes) -> list[bytes]:
        """Gather bytes of any length from each member, in rank order."""
        lengths = self.all_gather(replicas, torch.tensor([len(payload)], device=self.device)).view(-1).tolist()
        own = torch.frombuffer(bytearray(payload.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        rows = self.all_gather(replicas, own.to(self.device)).cpu()
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def gather_words(self, replicas: Ranks, words: np.ndarray) -> np.ndarray:
        """Gather (n,) uint64 from each member: (M, n), in rank order."""
        own = torch.from_numpy(words.view(np.int64)).to(self.device)
        return self.all_gather(replicas, own).cpu().numpy().view(np.uint64)

    def all_to_all(self, replicas: Ranks, rows: torch.Tensor) -> torch.Tensor:
        """(M, n) -> (M, n): `rows[i]` goes to the i-th member; row i of the result came from it."""
        if len(replicas) == 1:
            return rows
        received = torch.empty_like(rows)
        dist.all_to_all_single(_bytes(received), _bytes(rows), group=self._groups[replicas])
        return received

    def all_to_all_with(
        self, replicas: Ranks, rows: torch.Tensor, number: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`all_to_all`, with one float64 to all members in the same message: (M, n), and (M,) float64."""
        numbers = _bytes(number).expand(len(rows), number.nbytes)
        received = self.all_to_all(replicas, torch.cat([rows.contiguous().view(torch.uint8), numbers], 1))
        return _split(received, rows.nbytes // len(rows), rows.dtype)

    def send(self, replicas: Ranks, to: int, tensor: torch.Tensor) -> None:
        """Send a tensor to `to`, a rank of the job."""
        dist.send(_bytes(tensor.contiguous()), dst=to, group=self._groups[replicas])

    def receive(self, replicas: Ranks, source: int, like: torch.Tensor) -> torch.Tensor:
        """Receive a tensor of the dtype and shape of `like` from `source`."""
        received = torch.empty_like(like)
        dist.recv(_bytes(received), src=source, group=self._groups[replicas])
        return received

    def send_bytes(self, replicas: Ranks, to: int, payload: bytes) -> None:
        """Send bytes of any length, for `receive_bytes`."""
        self.send(replicas, to, torch.tensor([len(payload)], device=self.device))
        if payload:
            own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            self.send(replicas, to, own.to(self.device))

    def receive_bytes(self, replicas: Ranks, source: int) -> bytes:
        """Receive what `source` sends with `send_bytes`."""
        length = int(self.receive(replicas, source, torch.zeros(1, dtype=torch.int64, device=self.device)))
        if not length:
            return b""
        like = torch.empty(length, dtype=torch.uint8, device=self.device)
        return self.receive(replicas, source, like).cpu().numpy().tobytes()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _split(rows: torch.Tensor, nbytes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of bytes: `nbytes` of `dtype`, then one float64."""
    return rows[:, :nbytes].contiguous().view(dtype), rows[:, nbytes:].contiguous().view(torch.float64).view(-1)
