"""The collectives of loop 2: within a replica set, and over the whole job.

Invariant: the groups are its own, so that what goes on here never mixes with training's collectives; everybody calls in
the same order. Payloads go as bytes: any dtype, nothing is converted on the way. What is gathered is in the order of
ranks, so that whoever computes from it finds the same bits everywhere.

In: a process group for each replica set of this rank, and one of all ranks. Out: tensors of all members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from .noise import Table

Ranks = tuple[int, ...]


class Links:
    """One rank's."""

    def __init__(
        self, rank: int, groups: Mapping[Ranks, dist.ProcessGroup], job: dist.ProcessGroup, device: torch.device
    ) -> None:
        """`groups` by the ranks of a set, ascending. `device`: where what is sent lies."""
        self.rank = rank
        self.device = device
        self._groups = dict(groups)
        self._job = job

    def gather_job(self, row: Sequence[float]) -> Table:
        """The rows of all ranks of the job, by rank."""
        own = torch.tensor(row, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self._job.size())]
        dist.all_gather(found, own, group=self._job)
        return torch.stack(found).cpu().numpy()

    def gather(self, replicas: Ranks, own: torch.Tensor) -> torch.Tensor:
        """(M, ...): what each member gave, in the order of ranks."""
        found = torch.empty((len(replicas), *own.shape), dtype=own.dtype, device=own.device)
        dist.all_gather([_bytes(part) for part in found], _bytes(own.contiguous()), group=self._groups[replicas])
        return found

    def gather_words(self, replicas: Ranks, words: np.ndarray) -> np.ndarray:
        """(M, n): the 64-bit words of each member."""
        own = torch.from_numpy(words.view(np.int64)).to(self.device)
        return self.gather(replicas, own).cpu().numpy().view(np.uint64)

    def swap(self, replicas: Ranks, rows: torch.Tensor) -> torch.Tensor:
        """(M, n) -> (M, n): `rows[i]` goes to the i-th member; row i of the result came from it."""
        found = torch.empty_like(rows)
        group = self._groups[replicas]
        dist.all_to_all_single(_bytes(found), _bytes(rows), group=group)
        return found

    def send(self, replicas: Ranks, to: int, tensor: torch.Tensor) -> None:
        """Its bytes to `to`, a rank of the job."""
        dist.send(_bytes(tensor.contiguous()), dst=to, group=self._groups[replicas])

    def receive(self, replicas: Ranks, source: int, like: torch.Tensor) -> torch.Tensor:
        """What `source` sends, of the type and shape of `like`."""
        found = torch.empty_like(like)
        dist.recv(_bytes(found), src=source, group=self._groups[replicas])
        return found

    def send_bytes(self, replicas: Ranks, to: int, payload: bytes) -> None:
        """Any number of them, to be received by `receive_bytes`."""
        self.send(replicas, to, torch.tensor([len(payload)], device=self.device))
        if payload:
            own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            self.send(replicas, to, own.to(self.device))

    def receive_bytes(self, replicas: Ranks, source: int) -> bytes:
        """What `source` sends."""
        length = int(self.receive(replicas, source, torch.zeros(1, dtype=torch.int64, device=self.device)))
        if not length:
            return b""
        found = self.receive(replicas, source, torch.empty(length, dtype=torch.uint8, device=self.device))
        return found.cpu().numpy().tobytes()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
