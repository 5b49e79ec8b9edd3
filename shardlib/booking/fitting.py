"""The largest model that a machine trains in time.

How many tokens a model is trained on follows from its size: J. Hoffmann et al., "Training
compute-optimal large language models", arXiv:2203.15556, find by three ways that parameters and
tokens should grow alike, at about 20 tokens a parameter; T. Besiroglu et al., "Chinchilla scaling:
a replication attempt", arXiv:2404.10102, find the same from the corrected third. Models that are
to be cheap to serve are trained on more: Llama 3 405B on 15.6T tokens, 38 a parameter
(arXiv:2407.21783). So the number is an argument.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import optax

from shardlib.booking.family import family
from shardlib.booking.fitted import Fitted, Sized
from shardlib.booking.looking import Step, offer
from shardlib.booking.side_by_side import step_of
from shardlib.booking.target import Failures, Target
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import ArgumentError
from shardlib.frontend.traced_model import problem
from shardlib.hardware import topology as parse_topology
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.models import TransformerConfig, build, example_batch, load

#: Tokens a parameter with the least loss for its FLOPs, see above.
TOKENS_PER_PARAMETER = 20.0
#: Part of the peak at which the search for the largest model begins, and the smallest that is
#: looked at: parts of the parameters that the peak alone would allow.
FIRST_GUESS, SMALLEST = 0.65, 1e-3
#: Sizes above the largest in time that are planned, too.
BEYOND = 4


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a model may take.

    Attributes:
        deadline: seconds until the run has to be done.
        tokens_per_parameter: tokens of the run, for each parameter.
        tokens: of the run, whatever the size; None for so many a parameter.
        price: of a chip of the machine and hour, in money of your own; None for none.
        failures: how often machines fail; None where nothing fails.
    """

    deadline: float
    tokens_per_parameter: float = TOKENS_PER_PARAMETER
    tokens: float | None = None
    price: float | None = None
    failures: Failures | None = None

    def of(self, parameters: int) -> float:
        """Tokens for a model of so many parameters."""
        return self.tokens_per_parameter * parameters if self.tokens is None else self.tokens


def fit_model(
    model: str | TransformerConfig,
    *,
    topology: TopologyLike,
    budget: Budget,
    batch: int,
    seq: int,
    optimizer: optax.GradientTransformation | None = None,
    pin: PinMapping | None = None,
) -> Fitted:
    """The largest model of a family that a machine trains in time.

    Args:
        optimizer: an optax transformation; AdamW by default.
    """
    base = load(model) if isinstance(model, str) else model
    machine, pins = parse_topology(topology), Pins.parse(pin)
    limit = _most(base, machine, budget, exact=pin is None)
    sizes = family(base, limit * SMALLEST, limit)
    if not sizes:
        raise ArgumentError(
            f"no model of the family of {base.name} is as small as {machine.name} trains within"
            f" {budget.deadline:,.0f} s\nTry: a longer deadline, fewer tokens, or a larger machine"
        )
    adamw = optax.adamw(3e-4) if optimizer is None else optimizer

    def step(config: TransformerConfig) -> Step:
        init, loss = build(config)
        rows = example_batch(config, batch, seq)
        return step_of(problem(init, loss, adamw, rows, name=config.name), pins)

    looked = _Looked(sizes, machine, budget, step)
    counts = [size.parameter_count() for size in sizes]
    start = min(bisect.bisect(counts, limit * FIRST_GUESS), len(sizes) - 1)
    best = _largest(len(sizes), start, looked.meets)
    if best is None:
        raise ArgumentError(
            f"no model of {len(sizes)} sizes of the family of {base.name} is trained in time on"
            f" {machine.name}; {sizes[0].name}: {looked.at(0).why}\nTry: a longer deadline, fewer"
            " tokens, or a larger machine"
        )
    best = looked.beyond(best)
    return Fitted(
        family=base.name,
        topology=machine.name,
        deadline=budget.deadline,
        best=looked.at(best),
        looked=tuple(looked.seen[index] for index in sorted(looked.seen)),
        larger=tuple(size.name for index, size in enumerate(sizes) if index > best),
    )


def _most(base: object, machine: Topology, budget: Budget, *, exact: bool) -> float:
    """Parameters that no machine could train in time if all products ran at its peak: 6 FLOPs a
    parameter and token, for all but the table of the embedding (arXiv:2001.08361, section 2.1).
    That is at most half, since the head is as large as the table, or is the table.

    Args:
        exact: whether products have the dtype of the configuration; otherwise the fastest counts.
    """
    dtype = base.compute_dtype if isinstance(base, TransformerConfig) and exact else None
    rates = dict(machine.chip.flops_per_s)
    peak = rates.get(dtype or "", max(rates.values())) * machine.devices
    flops = peak * budget.deadline
    if budget.tokens is not None:
        return 2 * flops / (6 * budget.tokens)
    return (2 * flops / (6 * budget.tokens_per_parameter)) ** 0.5


class _Looked:
    """Sizes that have been looked at."""

    def __init__(
        self,
        sizes: Sequence[TransformerConfig],
        machine: Topology,
        budget: Budget,
        step: Callable[[TransformerConfig], Step],
    ) -> None:
        self.sizes, self.machine, self.budget, self.step = sizes, machine, budget, step
        self.seen: dict[int, Sized] = {}

    def at(self, number: int) -> Sized:
        """A size; excluded by its kernels where these alone take too long, else planned."""
        if number not in self.seen:
            self.seen[number] = self._sized(self.sizes[number])
        return self.seen[number]

    def meets(self, number: int) -> bool:
        """Whether a size is trained in time."""
        return self.at(number).meets

    def beyond(self, best: int) -> int:
        """The largest in time when some above it are looked at, too: times need not rise."""
        planned, index = 0, best + 1
        while index < len(self.sizes) and planned < BEYOND:
            planned += self.at(index).offer is not None
            if self.meets(index):
                best, planned = index, 0
            index += 1
        return best

    def _sized(self, config: TransformerConfig) -> Sized:
        parameters, step = config.parameter_count(), self.step(config)
        target = Target(
            tokens=self.budget.of(parameters),
            deadline=self.budget.deadline,
            failures=self.budget.failures,
            prices={} if self.budget.price is None else {self.machine.chip.name: self.budget.price},
        )
        bound = step.least(self.machine) * target.tokens / step.tokens / self.machine.devices
        sized = Sized(config=config, tokens=target.tokens, least_seconds=bound)
        if bound > target.deadline:
            return sized
        return replace(sized, offer=offer(self.machine, step, target))


def _largest(count: int, start: int, meets: Callable[[int], bool]) -> int | None:
    """The largest number that meets, as if all below one that meets do, too: steps that double,
    from a first guess, then halves.
    """
    step, index = 1, start
    if meets(start):
        low, high = start, count
        while (index := low + step) < high and meets(index):
            low, step = index, 2 * step
        high = min(index, high)
    else:
        low, high = -1, start
        while (index := high - step) >= 0 and not meets(index):
            high, step = index, 2 * step
        low = max(index, -1)
        if low < 0:
            low = 0
            if not meets(0):
                return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
