"""Ways to send less of a gradient. What is not sent stays on its island as a residual, and is added
to the gradient of the next step (error feedback).

Sizes are of what one device holds: every device compresses its shard, but for `PowerSGD`, which
approximates whole matrices.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar, TypeAlias

from shardlib.errors import PinError, raise_all
from shardlib.exchanges.checks import between, one_of, whole
from shardlib.exchanges.wires import BLOCK
from shardlib.untrusted.json_types import JsonObject

#: Densities of the warm-up of Lin et al., each for as many steps.
WARM_UP = (0.25, 0.0625, 0.015625, 0.004)


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Matrices of a low rank (Vogels et al., "PowerSGD", arXiv:1905.13727): with M the gradient of
    an island and its residual, and Q of the step before,

        P <- mean of M Q, orthonormalised;   Q <- mean of M^T P;   what is sent is P Q^T.

    A parameter is a matrix of its first dims by the others, divided where both are fewest, one for
    every layer of a stack; what has one dim, or would not get smaller, is sent as it is.

    Attributes:
        rank: of what is sent, at least 1.

    Raises:
        PinError: the rank is none.
    """

    kind: ClassVar[str] = "powersgd"
    stages: ClassVar[int] = 1

    rank: int = 4

    def __post_init__(self) -> None:
        if failures := whole("rank", self.rank, 1):
            raise_all(PinError, "by=PowerSGD is not usable", failures)

    def to_json(self) -> JsonObject:
        """The compressor as plain data."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The largest numbers alone (Lin et al., "Deep Gradient Compression", arXiv:1712.01887): with g
    the gradient of an island,

        u <- momentum u + g,   v <- v + u;   of v what is largest is sent, and zero in u and v then.

    The optimizer has no momentum of its own then: `optax.sgd(rate)`.

    Attributes:
        density: part of the numbers of a device's shard that are sent, more than 0, up to 1.
        momentum: of the sum that is sent.
        warm_up: first steps, in which density falls: a quarter, then a quarter of that, and so on.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "topk"

    density: float = 0.001
    momentum: float = 0.9
    warm_up: int = 0

    def __post_init__(self) -> None:
        failures = [
            *between("density", self.density, most=1.0, above=True, reached=True),
            *between("momentum", self.momentum, most=1.0, above=False),
            *whole("warm_up", self.warm_up, 0),
        ]
        if failures:
            raise_all(PinError, "by=TopK is not usable", failures)
        object.__setattr__(self, "density", float(self.density))
        object.__setattr__(self, "momentum", float(self.momentum))

    @property
    def densities(self) -> tuple[float, ...]:
        """The density of every stage, the last the one that stays."""
        falling = [density for density in WARM_UP if density > self.density] if self.warm_up else []
        return (*falling, self.density)

    @property
    def stages(self) -> int:
        """Number of densities."""
        return len(self.densities)

    def stage(self, step: int) -> int:
        """The stage of a step.

        >>> [TopK(density=0.05, warm_up=4).stage(step) for step in range(1, 7)]
        [0, 0, 1, 1, 2, 2]

        Args:
            step: 1 for the first.
        """
        falling = self.stages - 1
        return min(falling, (step - 1) * falling // self.warm_up) if falling else 0

    def sent(self, count: int, stage: int) -> int:
        """How many of so many numbers are sent.

        Args:
            count: of a device's shard.
            stage: of the warm-up; the last is that of all other steps.
        """
        return min(count, math.ceil(count * self.densities[stage]))

    def to_json(self) -> JsonObject:
        """The compressor as plain data."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Quantised:
    """Few bits a number, with a float32 scale for each block of them, summed in float32: an
    all-to-all and an all-gather, as in ZeRO++ (Wang et al., arXiv:2306.10209).

    Attributes:
        dtype: "int8" or "int4".
        block: numbers that share a scale, an even number.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "quantised"
    stages: ClassVar[int] = 1

    dtype: str = "int8"
    block: int = BLOCK

    def __post_init__(self) -> None:
        failures = [
            *one_of("dtype", self.dtype, ("int8", "int4")),
            *whole("block", self.block, 2),
        ]
        if not failures and self.block % 2:
            failures.append(f"block is {self.block}; it is even, since two int4 are a byte")
        if failures:
            raise_all(PinError, "by=Quantised is not usable", failures)

    def to_json(self) -> JsonObject:
        """The compressor as plain data."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Signs alone, times the mean of the absolute numbers of a parameter (EF-SignSGD, Karimireddy
    et al., arXiv:1901.09847): a bit a number.
    """

    kind: ClassVar[str] = "sign"
    stages: ClassVar[int] = 1

    def to_json(self) -> JsonObject:
        """The compressor as plain data."""
        return {"kind": self.kind}


Compressor: TypeAlias = PowerSGD | TopK | Quantised | Sign
#: Compressors by the word with which they are pinned.
COMPRESSORS: dict[str, type[PowerSGD] | type[TopK] | type[Quantised] | type[Sign]] = {
    form.kind: form for form in (PowerSGD, TopK, Quantised, Sign)
}
