"""The display of a training run: its progress, and text of the trained model."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from shardlib.models.transformer import Transformer
from shardlib.processes.progress import Progress
from shardlib.processes.timing import in_words
from shardlib.training.settings import Figures, TrainResult

#: Number of steps over whose median tokens per second are shown.
RECENT = 50
#: Seconds between two lines if the output is a file rather than a terminal.
LINE_EVERY = 30.0


class Display:
    """Progress on a terminal or in a notebook: the step, the loss, tokens per second and the
    remaining time; in a file, lines at intervals.
    """

    def __init__(self, console: Console, steps: int, tokens: int) -> None:
        """Args: steps: of the run. tokens: per batch."""
        self.tokens = tokens
        self._console, self._steps, self._line = console, steps, time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.progress = Progress("training", of=steps, console=console)

    def step(self, step: int, loss: float, seconds: float) -> None:
        """Shows a finished step, which took `seconds`."""
        self._recent.append(seconds)
        figures = f"loss {loss:.3f}, {self.tokens / statistics.median(self._recent):,.0f} tokens/s"
        self.progress.to(step, figures)
        file = not (self._console.is_terminal or self._console.is_jupyter)
        if file and time.monotonic() - self._line >= LINE_EVERY:
            self._line = time.monotonic()
            self.say(f"step {step} of {self._steps}: {figures}")

    def say(self, text: str) -> None:
        """Shows a separate line."""
        self._console.print(text, highlight=False, markup=False)

    def resumed(self, step: int, steps: int) -> None:
        """Shows the step from which the run resumes."""
        self.progress.first = step
        self.progress.to(step)
        self.say(
            f"the run has done all of its {steps} steps"
            if step >= steps
            else f"going on after step {step} of {steps}"
        )

    def stopped(self, reason: str, step: int, loss: float, *, kept: int | None) -> None:
        """Shows that the run was stopped.

        Args:
            kept: the saved step; None if nothing is saved.
        """
        after = f", loss {loss:.3f}" if math.isfinite(loss) else ""
        saved = "nothing was saved yet" if kept == 0 else "nothing was saved"
        if kept:
            saved = f"step {kept} is saved, and the same command goes on there"
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
    """Predicted against measured; times are compared only if other programs left the machine idle,
    or if that is unknown.

    Args:
        busy: fraction of processor time used by other programs; None if unknown.
    """
    compared = busy is None or not in_words(busy)
    table = Table("", "predicted", "measured", "measured / predicted")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        ("step", "step_seconds", 1e3, "{:,.1f} ms"),
        ("tokens a second", "tokens_per_second", 1.0, "{:,.0f}"),
        ("peak memory of a device", "device_bytes", 2**-20, "{:,.1f} MiB"),
    )
    for name, figure, unit, text in rows:
        before, after = getattr(predicted, figure), getattr(measured, figure)
        ratio = f"{after / before:.2f}" if before and (compared or "memory" in name) else "-"
        table.add_row(name, text.format(before * unit), text.format(after * unit), ratio)
    return table


def _printable(text: str) -> str:
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )


def generate(
    model: Transformer,
    prompt: bytes,
    count: int,
    *,
    window: int,
    seed: int,
    temperature: float = 0.8,
) -> bytes:
    """Continues a text byte by byte.

    Every byte is predicted from the last `window` bytes, recomputed each time without a cache: fast
    enough for a sample.

    Args:
        prompt: at least one byte; only its last `window` bytes are used.
        count: number of bytes to generate.
        window: context length in bytes.
        temperature: values below 1 prefer likely bytes.
    """
    definition, state = nnx.split(model)
    start = np.zeros((1, window), np.int32)
    used = prompt[-window:]
    start[0, : len(used)] = list(used)

    def write(state: nnx.State, tokens: jax.Array) -> jax.Array:
        def step(
            carry: tuple[jax.Array, jax.Array], key: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            tokens, length = carry
            logits = nnx.merge(definition, state)(tokens)[0, :, :256]
            choice = jax.random.categorical(key, logits[length - 1] / temperature).astype(jnp.int32)
            full = length == window
            tokens = jnp.where(full, jnp.roll(tokens, -1, axis=1), tokens)
            length = jnp.where(full, window, length + 1)
            return (tokens.at[0, length - 1].set(choice), length), choice

        start = (tokens, jnp.asarray(len(used), jnp.int32))
        return jax.lax.scan(step, start, jax.random.split(jax.random.key(seed), count))[1]

    return bytes(np.asarray(jax.jit(write)(state, start)).astype(np.uint8))
