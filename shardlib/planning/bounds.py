"""What can no plan beat? Lower bounds of a step, before anything is placed.

A stage is busy in every microbatch with kernels and with the collectives that compute waits for. With every group of axes on the fastest links that it could have alone, all
stages equally full and the smallest bubble of any schedule, that is a bound of the step time. Gathers of parameters and reductions of gradients may hide behind compute, so
it leaves them out. It is a sum over the components of the colours (`planning/ledger.py`), so the bound of a choice is a sum of arrays that are there already, and
the least of all choices is the sum of the least of every component.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardlib.cost.links import best_links, role_slots
from shardlib.cost.measures import Values
from shardlib.cost.schedules import put_off
from shardlib.cost.tally import BYTES, COUNTS, ROWS, Pricer, Q, Tally
from shardlib.planning import space
from shardlib.planning.ledger import subsets
from shardlib.planning.space import Space
from shardlib.planning.workload import Workload
from shardlib.propagation.assignment import Choice

Array = np.ndarray
#: A remat policy, and whether tokens are routed.
Program = tuple[str, bool]


class Bounds:
    """Lower bounds of step times.

    Args:
        load, room: the model and the space.
        pricer: the machine.
        values: measures on all shapes of the space.
        cuttable: colours that some choice cuts.
        along: the colour that the context axis cuts.
    """

    def __init__(self, load: Workload, room: Space, pricer: Pricer, values: Values, cuttable: tuple[str, ...], along: str | None) -> None:
        self._load, self._room, self._pricer, self._values, self._along = load, room, pricer, values, along
        self._accounts = load.ledger.accounts(cuttable)
        work = values.work
        none = np.ones(len(work), dtype=np.int64)
        self._links = best_links({"stage": none, "data": none, "fsdp": none, "expert": work.expert, "context": work.context, "tensor": work.tensor}, pricer.topology)
        self._first = np.zeros(len(work), dtype=np.int64)
        self._first[values.which[::-1]] = np.arange(len(values.which))[::-1]
        self._busy: dict[tuple[Program, tuple[str, ...], Choice], Array] = {}
        self._fits = {name: load.colouring.colours[name].divisor % work.tensor == 0 for name in cuttable}

    def choice(self, choice: Choice, routes: bool) -> Choice:
        """A choice of the space with what the context and expert axes cut."""
        return replace(choice, context=self._along, expert=self._load.expert if routes else None)

    def tick(self, program: Program, choice: Choice) -> Array:
        """Seconds of a microbatch by shape but for fsdp, and those less twice the gradients of weights, on all stages together: array [2, shapes]."""
        account = self._accounts[program]
        return sum((self._part(program, part, choice) for part in ((), *account.parts)), np.zeros((2, len(self._values.work))))

    def least(self, program: Program) -> Array:
        """The least of all choices, array [2, shapes]; infinite where no choice fits."""
        account, work = self._accounts[program], self._values.work
        found = np.full((2, len(work)), np.inf)
        for flag in dict.fromkeys(choice.sequence for choice in self._room.choices):
            mine = [self.choice(choice, program[1]) for choice in self._room.choices if choice.sequence == flag]
            total = np.where((work.tensor > 1) | (flag is None), self._part(program, (), mine[0]), np.inf)
            for part in account.parts:
                total = total + self._least_of(program, part, mine)
            found = np.minimum(found, total)
        return np.where(work.expert == 1, found, np.inf) if not program[1] else found

    def _least_of(self, program: Program, part: tuple[str, ...], choices: list[Choice]) -> Array:
        """The least of a component over the ways to cut it that fit."""
        tensor = self._values.work.tensor
        fixed = self._room.pins.rules is not None
        options = {tuple(name for name in choice.tensor if name in part) for choice in choices} if fixed else subsets(part)
        found = np.full((2, len(tensor)), np.inf)
        for cut in options:
            fits = np.logical_and.reduce([self._fits[name] for name in cut] + [tensor > (1 if cut else 0)])
            found = np.minimum(found, np.where(fits, self._part(program, part, replace(choices[0], tensor=cut)), np.inf))
        return found

    def _part(self, program: Program, part: tuple[str, ...], choice: Choice) -> Array:
        """Seconds of a component under a choice, and those less what gradients of weights take off the bubble of zero-bubble; zeros where the choice makes no sense."""
        (_, restricted), tally = self._accounts[program].of(part, choice)
        key = program, part, restricted
        if key not in self._busy:
            work = self._values.work
            sense = (work.tensor > 1) if restricted.tensor or restricted.sequence else (work.tensor > 0)
            at = np.flatnonzero(sense if program[1] else sense & (work.expert == 1))
            found = np.zeros((2, len(work)))
            found[:, at] = self._seconds(tally, at)
            self._busy[key] = found
        return self._busy[key]

    def _seconds(self, tally: Tally, at: Array) -> Array:
        """See `_part`, on some of the shapes."""
        slots = role_slots("block")
        folded = tally.folded(ROWS * len(self._load.counts) + 2 * ROWS, ROWS, [Q.COMPUTE, Q.WEIGHTS, *(first + slot for first in (COUNTS, BYTES) for slot in slots)])
        rows = np.zeros((ROWS, len(at)))
        rows[folded.rows] = folded.on(self._values, self._first[at])
        rows = self._pricer.corrected(rows)
        used = [slot for slot in slots if COUNTS + slot in folded.rows]
        waits = self._pricer.waits(used) if used else np.zeros((0, 1))
        seconds = rows[Q.COMPUTE] + ((rows[[COUNTS + slot for slot in used]] * self._links.latency[used][:, at]
                                      + rows[[BYTES + slot for slot in used]] * self._links.per_byte[used][:, at]) * waits).sum(0)
        return np.stack([seconds, seconds - put_off(lockstep=self._load.stack.pipeline == "lockstep") * rows[Q.WEIGHTS]])


def step_seconds(tick: Array, stages: Array, micro: Array, room: Space, *, zero_bubble: bool) -> Array:
    """A bound of the step time.

    Args:
        tick: seconds of a microbatch, and those less what gradients of weights take off a bubble, by candidate: array [2, candidates].
        stages, micro: stages and microbatches by candidate.
        room: the space, for the chunks of layers on a stage.
        zero_bubble: whether gradients of weights may be put off.
    """
    each = tick / stages
    waits = each[0] / (room.pins.virtual_stages or space.MAX_VIRTUAL)
    waits = np.minimum(waits, np.maximum(0.0, each[1])) if zero_bubble else waits
    return each[0] * micro + (stages - 1) * np.where(np.isfinite(waits), waits, 0.0)
