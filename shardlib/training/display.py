"""What does a person see of a training run?"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shardlib.training.result import Figures, TrainResult


def progress_bar(console: Console) -> Progress:
    """A bar with the step, the loss, tokens a second and the time that remains."""
    return Progress(
        TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"), TimeRemainingColumn(), console=console, transient=False)


def show_result(console: Console, result: TrainResult, prompt: str) -> None:
    """Prints the sample, the losses, and predicted against measured."""
    if result.sample:
        console.print(Rule("the model writes", style="dim"))
        console.print(Text(prompt, style="bold") + Text(_printable(result.sample)))
        console.print(Rule(style="dim"))
    console.print(f"validation loss [bold]{result.validation_loss:.3f}[/] nats a byte; a byte bigram model has {result.bigram_loss:.3f}")
    console.print(figures_table(result.predicted, result.measured))


def figures_table(predicted: Figures, measured: Figures) -> Table:
    """Predicted against measured."""
    table = Table("", "predicted", "measured", "measured / predicted")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (("step", predicted.step_seconds, measured.step_seconds, lambda value: f"{value * 1e3:,.1f} ms"),
            ("tokens a second", predicted.tokens_per_second, measured.tokens_per_second, lambda value: f"{value:,.0f}"),
            ("peak memory of a device", predicted.device_bytes, measured.device_bytes, lambda value: f"{value / 2**20:,.1f} MiB"))
    for name, one, other, text in rows:
        table.add_row(name, text(one), text(other), f"{other / one:.2f}" if one else "-")
    return table


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text)
