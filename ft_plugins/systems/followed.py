"""What a rank lets its SMP see of its progress, and its stacks if it makes none; when it reports a lost connection.

Invariant: an error here never stops training: the rank is then not watched, and says so once.

A lost connection is not reported while it can be the death of the other rank, which the launcher reports and ends by a
restart: a job that is killed stays as quiet as it was. That rank can have contributed to the iteration in which the
loss was seen and to the next one, but to none after those; and where replicas train without each other, the launcher
has restarted the job before `QUIET_SECONDS`. A job that trains on has lost the connection alone. Both ends report it,
once; the other ranks, which learn of it from them, do not. Protection goes on: an outage of the network that training
does not use would else end it, and with it the job, although all versions are whole.

In: host, configuration, launch context. Out: words in the rank's segment, written at each edge.
"""

from __future__ import annotations

from collections.abc import Callable

from ..bubbles.timeline.record import EdgeFanout
from ..collective import LostNeighbour
from ..config import Config, LaunchContext
from ..errors import UnsupportedError
from ..events import Events, catalogue
from ..model.host import Edges, Host
from ..model.progress import ProgressEdges
from ..smp.watch import stacks
from ..snapshot.segment.paths import path_of
from ..snapshot.segment.progress_words import NoProgress, ProgressFacts, ProgressWriter


class ProgressReport:
    """The words of one rank: `words`, which are not read before `begin`."""

    def __init__(self) -> None:
        self.words: ProgressWriter | NoProgress = NoProgress()
        self._deafen: Callable[[], None] | None = None

    @property
    def written(self) -> bool:
        return isinstance(self.words, ProgressWriter)

    def begin(self, host: Host, config: Config, context: LaunchContext, events: Events) -> None:
        """Write from now on. The rank's segment exists."""
        run_dir = context.run_dir
        if run_dir is None or config.hang_seconds == 0:
            return
        topology = host.topology()
        limit = None if config.hang_seconds == "auto" else config.hang_seconds
        try:
            facts = ProgressFacts(
                context.token, limit, topology.coords(host.rank).pp, topology.world_size, context.local_world_size
            )
            self.words = ProgressWriter(path_of(run_dir.parent.name, run_dir.name, host.rank), facts)
            if context.agent_pid is None:  # else it has listened from its beginning
                self._deafen = stacks.listen(run_dir, host.rank)
        except (OSError, ValueError) as error:
            events.emit(catalogue.PROGRESS_UNWATCHED, reason=str(error))
        if topology.tp > 1 or topology.cp > 1 or topology.ep > 1:
            self.words.shares_forward()

    def with_spans(self, edges: Edges) -> Edges:
        """`edges`, and the words if they are read."""
        return EdgeFanout(ProgressEdges(self.words), edges) if self.written else edges

    def follow_spans(self, host: Host) -> bool:
        """Follow the spans of `host` for the words alone, if they can be followed. Returns whether they are."""
        if not self.written:
            return False
        try:
            host.install_edges(ProgressEdges(self.words))
        except UnsupportedError:
            return False
        return True

    def end(self) -> None:
        """The orderly end of training. Idempotent."""
        self.words.close()
        self.words = NoProgress()
        deafen, self._deafen = self._deafen, None
        if deafen is not None:
            deafen()


QUIET_ITERATIONS = 2
QUIET_SECONDS = 30.0


class Disconnection:
    """The lost connection of one rank, if it loses one."""

    def __init__(self) -> None:
        self._seen: int | None = None  # the iteration at whose end the loss was first seen
        self._over = False

    def due(self, lost: LostNeighbour | None, step: int, now: float) -> LostNeighbour | None:
        """The loss, if it is to be reported at the end of iteration `step`, at `time.monotonic()`."""
        if lost is None or self._over:
            return None
        if self._seen is None:
            self._seen = step
        if step < self._seen + QUIET_ITERATIONS or now < lost.at + QUIET_SECONDS:
            return None
        self._over = True
        return lost
