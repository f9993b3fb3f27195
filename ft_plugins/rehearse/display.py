"""Show driven jobs while they run: one bar per job in a terminal, plain lines elsewhere.

In: successive `Progress` of a job. Out: terminal output.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from .driver import DrivePhase, Progress


def display_on(console: Console, ranks: int | None) -> Display:
    """Bars in a terminal, lines if the output is a file or a pipe. `ranks`: of the job; None if that is not known."""
    return TerminalDisplay(console, ranks) if console.is_terminal else LineDisplay(console, ranks)


def _state(progress: Progress, ranks: int | None) -> str:
    """The phase in words."""
    of = "" if ranks is None else f"/{ranks}"
    if progress.phase in (DrivePhase.STARTING, DrivePhase.RESTARTING):
        return f"{progress.phase.value} ({progress.attached}{of} ranks)"
    return progress.phase.value


def _loss(progress: Progress) -> str:
    return "" if progress.loss is None else f"loss {progress.loss:.4f}"


class TerminalDisplay:
    """One bar per job, redrawn a few times a second."""

    def __init__(self, console: Console, ranks: int | None) -> None:
        self._ranks = ranks
        self._bars = Bars(
            TextColumn("{task.description:<17}"),
            TextColumn("{task.fields[state]:<20}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]:<11}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._bars.start()
        self._task: TaskID | None = None

    def begin(self, name: str, iterations: int) -> None:
        self._task = self._bars.add_task(name, total=iterations, state=DrivePhase.STARTING.value, loss="")

    def show(self, progress: Progress) -> None:
        if self._task is not None:
            self._bars.update(
                self._task, completed=progress.iteration, state=_state(progress, self._ranks), loss=_loss(progress)
            )
            if progress.phase is DrivePhase.DONE:
                self._bars.stop_task(self._task)

    def say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False)

    def close(self) -> None:
        self._bars.stop()


class LineDisplay:
    """One line at each change of phase and at every tenth of the iterations."""

    def __init__(self, console: Console, ranks: int | None) -> None:
        self._console, self._ranks = console, ranks
        self._name, self._step, self._shown = "", 1, ("", 0)

    def begin(self, name: str, iterations: int) -> None:
        self._name, self._step, self._shown = name, max(1, iterations // 10), ("", 0)

    def show(self, progress: Progress) -> None:
        state = _state(progress, self._ranks)
        tenth = progress.iteration // self._step
        if (state, tenth) == self._shown:
            return
        self._shown = (state, tenth)
        self.say(f"[{progress.seconds:6.1f} s] {self._name}: {state}, iteration {progress.iteration} {_loss(progress)}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        return


Display = TerminalDisplay | LineDisplay
