"""Learning rates scaled with the batch, and the largest sensible batch.

A batch k times as large takes k times fewer steps, so each must go further. Goyal et al.
(arXiv:1706.02677) scale the rate of SGD by k and warm it up over the first epochs, to 8,192 images;
for Adam the square root of k follows from the noise of its normalised steps (Malladi et al.,
arXiv:2205.10287). LARS (You et al., arXiv:1708.03888) and LAMB (arXiv:1904.00962) scale the rate of
every layer by the norms of weights and updates, and reach batches of 32 thousand. (Beyond the
critical batch size more examples per step save few steps under any rule; plans of language models
report it, `shardlib.planner.findings`.)

>>> scaled(0.1, batch=8192, base=256, rule="linear")
3.2
>>> round(scaled(1e-3, batch=1024, base=256, rule="sqrt"), 6)
0.002
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import optax

from shardlib.errors import ModelError, raise_all
from shardlib.findings import Finding

#: Scaling of the rate with the batch: the exponent of the ratio.
RULES = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}


#: Optimizers for large batches, and the scaling rule of each.
OPTIMIZERS = {"sgd": "linear", "lars": "linear", "adamw": "sqrt", "lamb": "sqrt"}


#: Ratio to the base batch up to which each rule was shown to keep the result: 256 to 8,192 images
#: (Goyal et al.); 512 to 32,768 sequences of BERT (You et al., with LAMB).
SEEN = {"linear": 32.0, "sqrt": 64.0}


def scaled(rate: float, *, batch: int, base: int, rule: str) -> float:
    """The rate for a batch, from that of a base batch."""
    failures = [
        f"{name} is {value}; it must be at least 1"
        for name, value in (("batch", batch), ("base", base))
        if value < 1
    ]
    failures += [] if rule in RULES else [f"rule is {rule!r}; it is one of {', '.join(RULES)}"]
    if failures:
        raise_all(ModelError, "the learning rate cannot be scaled", failures)
    return rate * (batch / base) ** RULES[rule]


def warmed_up(rate: float, *, warm_up: int, steps: int, floor: float = 0.05) -> optax.Schedule:
    """A rate that rises linearly over `warm_up` steps, and decays along a cosine to `floor` times
    its peak at the last step.
    """
    return optax.warmup_cosine_decay_schedule(
        rate / max(warm_up, 1), rate, warm_up, max(steps, warm_up + 1), rate * floor
    )


def large_batch(
    name: str,
    rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.0,
    clip: float | None = None,
    momentum: float = 0.9,
) -> optax.GradientTransformation:
    """An optax optimizer for large batches."""
    if name == "sgd":
        chosen = optax.chain(
            optax.add_decayed_weights(weight_decay),
            optax.sgd(rate, momentum=momentum, nesterov=True),
        )
    elif name == "lars":
        chosen = optax.lars(rate, weight_decay=weight_decay, momentum=momentum)
    elif name == "adamw":
        chosen = optax.adamw(rate, b2=0.95, weight_decay=weight_decay)
    elif name == "lamb":
        chosen = optax.lamb(rate, weight_decay=weight_decay)
    else:
        raise ModelError(
            f"optimizer {name!r} is not known\nTry: one of {', '.join(OPTIMIZERS)}, or any optax"
            " transformation of your own"
        )
    return chosen if clip is None else optax.chain(optax.clip_by_global_norm(clip), chosen)


def batch_findings(*, batch: int, base: int, rule: str) -> tuple[Finding, ...]:
    """A warning if a batch is outside the range in which a rule was shown to keep results."""
    if batch <= SEEN.get(rule, math.inf) * base:
        return ()
    return (
        Finding(
            code="large-batch",
            severity="warning",
            where=f"batch={batch}",
            message=(
                f"the {rule} rule was seen to keep results up to {SEEN[rule]:g} times the base"
                f" batch; {batch} is {batch / base:.0f} times {base}"
            ),
            hint="a longer warm-up, LARS or LAMB, or a smaller batch with more steps",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A global batch that grows from `first` to `last` examples, by `increment` at a time, over the
    first `examples` examples (like Megatron-LM's rampup-batch-size).

    >>> ramp = Ramp(first=8, last=32, increment=8, examples=96)
    >>> ramp.stages()
    ((8, 0, 0), (16, 4, 32), (24, 6, 64), (32, 8, 112))

    Attributes:
        first: examples of the first batch.
        last: examples of the final batch.
        increment: increase at every stage.
        examples: number of examples after which the batch has its full size.

    Raises:
        ModelError: numbers that do not fit, all of them listed.
    """

    first: int
    last: int
    increment: int
    examples: int

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("first", "last", "increment", "examples")
            if getattr(self, name) < 1
        ]
        if not failures and (self.last <= self.first or (self.last - self.first) % self.increment):
            failures.append(
                f"from {self.first} to {self.last} is not a whole number of increments of"
                f" {self.increment}"
            )
        if failures:
            raise_all(ModelError, "the ramp of the batch size is not usable", failures)

    def stages(self) -> tuple[tuple[int, int, int], ...]:
        """(examples per batch, first step, examples seen before it) of every stage; a stage ends
        with the first step that completes its share of the examples.
        """
        found: list[tuple[int, int, int]] = []
        number = (self.last - self.first) // self.increment
        step = seen = 0
        for index in range(number + 1):
            size = self.first + index * self.increment
            found.append((size, step, seen))
            if index < number:
                steps = max(math.ceil((self.examples * (index + 1) / number - seen) / size), 1)
                step, seen = step + steps, seen + steps * size
        return tuple(found)

    def at(self, step: int) -> tuple[int, int]:
        """(examples of the batch of a step, examples seen before it)."""
        size, first, seen = max(stage for stage in self.stages() if stage[1] <= step)
        return size, seen + (step - first) * size
