"""What a person sees of a training run."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shardlib.training.measures.busy import in_words
from shardlib.training.notebook import NotebookBar
from shardlib.training.result import Figures, TrainResult

#: Steps whose median gives the tokens a second that are shown.
RECENT = 50
#: Seconds between two lines where the output is a file and not a terminal.
LINE_EVERY = 30.0


class Display:
    """Progress on a console: a bar with the step, the loss, tokens a second and the time that is
    left; in a notebook the same in HTML; in files, a line now and then.
    """

    def __init__(self, console: Console, steps: int, tokens: int) -> None:
        """Args: steps: in all. tokens: of a batch."""
        self.tokens = tokens
        self._console, self._steps, self._line = console, steps, time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=False,
        )
        self._notebook = NotebookBar(steps) if console.is_jupyter and not console.quiet else None
        self._task = self._bar.add_task("", total=steps, loss=math.nan, rate=0.0)

    def __enter__(self) -> Display:
        if self._notebook is None:
            self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._notebook is None:
            self._bar.stop()

    def step(self, step: int, loss: float, seconds: float) -> None:
        """A step is done, in so many seconds.

        Args:
            seconds: that it took.
        """
        self._recent.append(seconds)
        rate = self.tokens / statistics.median(self._recent)
        self._bar.update(self._task, completed=step, loss=loss, rate=rate)
        if self._notebook is not None:
            self._notebook.update(step, loss, rate)
            return
        if not self._console.is_terminal and time.monotonic() - self._line >= LINE_EVERY:
            self._line = time.monotonic()
            self.say(f"step {step} of {self._steps}: loss {loss:.3f}, {rate:,.0f} tokens/s")

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, highlight=False, markup=False)

    def resumed(self, step: int, steps: int) -> None:
        """The run goes on where it was saved."""
        self._bar.update(self._task, completed=step)
        self.say(
            f"the run has done all of its {steps} steps"
            if step >= steps
            else f"going on after step {step} of {steps}"
        )

    def stopped(self, reason: str, step: int, loss: float, *, kept: int | None) -> None:
        """Somebody stopped the run.

        Args:
            kept: the step that was saved; None where nothing is.
        """
        after = f", loss {loss:.3f}" if math.isfinite(loss) else ""
        saved = (
            "nothing was saved"
            if kept is None
            else (
                f"step {kept} is saved, and the same command goes on there"
                if kept
                else "nothing was saved yet"
            )
        )
        self.say(f"stopped by {reason} after {step} of {self._steps} steps{after}; {saved}")


def show_result(console: Console, result: TrainResult, prompt: str) -> None:
    """Prints the sample, the losses, and predicted against measured."""
    if result.sample:
        console.print(Rule("the model writes", style="dim"))
        console.print(Text(prompt, style="bold") + Text(_printable(result.sample)))
        console.print(Rule(style="dim"))
    console.print(
        f"validation loss [bold]{result.validation_loss:.3f}[/] nats a byte; a byte bigram model"
        f" has {result.bigram_loss:.3f}"
    )
    console.print(figures_table(result.predicted, result.measured, result.busy))
    why = in_words(result.busy)
    if why and result.busy is not None:
        console.print(
            f"{why} meanwhile: measured times are not compared with those predicted for a machine"
            " that does nothing else",
            highlight=False,
        )
    elif why:
        console.print(
            f"{why}: measured times count for a machine that does nothing else", highlight=False
        )


def figures_table(predicted: Figures, measured: Figures, busy: float | None = None) -> Table:
    """Predicted against measured; times are compared where others left the machine alone, or where
    nobody knows whether they did.

    Args:
        busy: share of the processors that other programs used; None where it is not known.
    """
    compared = busy is None or not in_words(busy)
    table = Table("", "predicted", "measured", "measured / predicted")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        (
            "step",
            predicted.step_seconds,
            measured.step_seconds,
            lambda value: f"{value * 1e3:,.1f} ms",
        ),
        (
            "tokens a second",
            predicted.tokens_per_second,
            measured.tokens_per_second,
            lambda value: f"{value:,.0f}",
        ),
        (
            "peak memory of a device",
            predicted.device_bytes,
            measured.device_bytes,
            lambda value: f"{value / 2**20:,.1f} MiB",
        ),
    )
    for name, one, other, text in rows:
        table.add_row(
            name,
            text(one),
            text(other),
            f"{other / one:.2f}" if one and (compared or "memory" in name) else "-",
        )
    return table


def _printable(text: str) -> str:
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )
