"""Write some metrics where the framework writes its scalars, on the rank that has its writer.

Invariant: a thread asks the SMP and reads events; the step path writes what that thread has left there, and compares
one reference in all other iterations. An error costs the scalars, never the job.

In: a run directory, a writer of the host. Out: scalars; at most one `scalars.failed` event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import FtError
from ..events import Events, catalogue
from ..metrics.exposition import counts_of, node_of
from ..metrics.scalars import scalars_of
from ..model.host import Host, ScalarWriter, Writing
from ..smp.serve.local_connection import LocalConnection

_ASK_SECONDS = 1.0  # for the SMP to answer
_LONGEST_SECONDS = 5.0  # of one write, every rank waits for it
_READ_BYTES = 1 << 20  # of each file of events at a time: training needs the interpreter, and the rest can wait


class ScalarReport:
    """The scalars of one rank, from its first completed iteration to `close`."""

    def __init__(self, run_dir: Path, write: ScalarWriter, seconds: float, events: Events) -> None:
        self._run_dir, self._seconds, self._events = run_dir, seconds, events
        self._write: ScalarWriter | None = write
        self._counts = counts_of(run_dir)
        self._fresh: Mapping[str, float] | None = None  # not written yet
        self._step = 0  # the last completed iteration
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-scalars", daemon=True)
        self._thread.start()

    def completed(self, step: int) -> None:
        """Iteration `step` is completed."""
        self._step = step
        if self._fresh is None or self._write is None:
            return
        scalars, self._fresh = self._fresh, None
        began = time.monotonic()
        try:
            self._write(scalars, step)
        except Exception as error:  # of the framework's writer: a full disk, a server that is away
            self._failed(f"{type(error).__name__}: {error}")
        else:
            if (took := time.monotonic() - began) > _LONGEST_SECONDS:
                self._failed(f"the framework's writer took {took:.0f} s, while training waited")

    def _failed(self, reason: str) -> None:
        if self._write is not None:
            self._write = None
            self._events.emit(catalogue.SCALARS_FAILED, reason=reason)

    def close(self) -> None:
        """Write what is known at the end of training. Idempotent."""
        self._ended.set()
        self._thread.join(2 * _ASK_SECONDS)
        write, self._write = self._write, None
        if write is not None and self._fresh is not None:
            with suppress(Exception):
                write(self._fresh, self._step)

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # of what an SMP answered
            self._failed(f"{type(error).__name__}: {error}")

    def _read(self) -> None:
        ended = False
        while not ended and self._write is not None:
            ended = self._ended.is_set()
            self._fresh = scalars_of(node_of(self._run_dir, self._status(), self._counts, _READ_BYTES))
            self._ended.wait(0.0 if ended else self._seconds)

    def _status(self) -> Mapping[str, Any] | None:
        with suppress(FtError, OSError), LocalConnection(self._run_dir, _ASK_SECONDS) as connection:
            return connection.status()
        return None


def scalar_report(host: Host, config: Config, run_dir: Path | None, events: Events) -> ScalarReport | None:
    """None if this rank has no writer, or none is wanted."""
    write = host.write_scalars if isinstance(host, Writing) else None
    if write is None or run_dir is None or not config.scalar_seconds:
        return None
    try:
        return ScalarReport(run_dir, write, config.scalar_seconds, events)
    except Exception as error:  # no thread can be started, no file read
        events.emit(catalogue.SCALARS_FAILED, reason=f"{type(error).__name__}: {error}")
        return None
