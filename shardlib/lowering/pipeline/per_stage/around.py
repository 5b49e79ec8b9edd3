"""What is around the work of a step: parameters that may be on their way, and the update after it.

Where parameters are on their way, each stage begins when it has its own. Tasks of one stage keep
their order, and so do the numbers; a stage which waits for its parameters holds up nobody but those
that need what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from shardlib import _jax_compat
from shardlib.jax_types import Metrics
from shardlib.lowering.pipeline.per_stage.prologue import Summed
from shardlib.lowering.pipeline.shared.partition import Arrays
from shardlib.lowering.runtime.state import TrainState
from shardlib.schedules.orders import Task

#: Model state after a step, and what the stages have summed.
Made = tuple[Arrays, Summed]


class Arriving(Protocol):
    """Parameters of which stages have some and wait for others."""

    def there(self, stage: int) -> bool:
        """Whether a stage has all that it needs; true, too, where something has failed."""
        ...

    def part(self, array: jax.Array, stage: int) -> jax.Array | None:
        """What a stage has of a parameter in place of the array that stood for it, once it is
        there; None for an array that is no such parameter.
        """
        ...


class Update(Protocol):
    """What makes the next state of the gradients, after the last microbatch: one program, or
    several where some of the state is not on the devices.
    """

    def step(self, state: TrainState, batch: Made, /) -> tuple[TrainState, Metrics]:
        """(state, (model state after the step, `Summed`)) -> (state, metrics); the state is
        donated.
        """
        ...

    def memory(self) -> dict[str, int]:
        """Bytes per device of the program that needs the most."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class OneUpdate:
    """An update that is one program.

    Attributes:
        call: it.
        run: what runs it.
    """

    call: jax.stages.Compiled
    run: Callable[..., tuple[TrainState, Metrics]]

    def step(self, state: TrainState, batch: Made, /) -> tuple[TrainState, Metrics]:
        """The next state, and metrics."""
        return self.run(state, batch)

    def memory(self) -> dict[str, int]:
        """Its bytes per device."""
        return _jax_compat.compiled_memory(self.call)


def in_turn(
    turns: Sequence[tuple[int, Task]],
    ready: Callable[[int, Task], bool],
    do: Callable[[int, Task], None],
    arriving: Arriving,
) -> None:
    """Does all tasks, each as soon as its stage has its parameters and its neighbours have done
    what it reads; where none can be done, it waits for the first one's parameters.
    """
    left = list(turns)
    while left:
        waiting, later = set[int](), list[tuple[int, Task]]()
        for stage, task in left:
            if stage in waiting or not (ready(stage, task) and arriving.there(stage)):
                waiting.add(stage)
                later.append((stage, task))
            else:
                do(stage, task)
        if len(later) == len(left):
            stage, task = later.pop(0)
            do(stage, task)  # asks for its parameters, and waits
        left = later
