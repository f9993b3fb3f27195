"""The memory that a pod of a job needs, from what protection claims and what training itself takes.

Memory of an `emptyDir` with `medium: Memory` counts against the limit of the container that writes it, so the limit has
room for both. Of each a part is left, as of a node (`SPARE`). Pure.

In: bytes. Out: `PodMemory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..snapshot.segment.paths import SPARE

_MIB = 1 << 20


@dataclass(frozen=True)
class PodMemory:
    """In MiB: `/dev/shm`, and the container's request and limit."""

    shm: int
    container: int

    def block(self) -> dict[str, str]:
        """Both as Kubernetes writes them, for programs."""
        return {"shm_size_limit": f"{self.shm}Mi", "memory": f"{self.container}Mi"}

    def lines(self) -> Iterator[str]:
        """The parts of a manifest where they stand."""
        yield f"""volumes:
  - name: shm
    emptyDir: {{medium: Memory, sizeLimit: {self.shm}Mi}}
containers:
  - resources:
      requests: {{memory: {self.container}Mi}}
      limits: {{memory: {self.container}Mi}}"""


def pod_memory(claimed: int, training: int) -> PodMemory:
    """For `claimed` bytes of `/dev/shm` at most, and `training` bytes of all processes of the pod."""
    return PodMemory(_with_spare(claimed), _with_spare(claimed + training))


def _with_spare(nbytes: int) -> int:
    """The smallest number of MiB of which that many bytes leave the spare part."""
    return -(-nbytes * SPARE // ((SPARE - 1) * _MIB))
