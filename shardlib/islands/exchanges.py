"""Exchanges between islands: what they send over slow links, when, and in what form; values, free
of JAX.

A plan says how one island trains; its *exchange* says how islands meet. The kinds are exact sums of
compressed gradients (`Compressed`), outer steps (`DiLoCo`), averages with neighbours (`Gossip`),
and training over parameter servers without a barrier (`Asynchronous`).

A `Part` is a range of elements of one parameter, which cross together.

>>> str(Part(path="layers.up", start=0, stop=512))
'layers.up[0:512]'

A wire dtype is the dtype in which elements cross.

A sum in float32 is one all-reduce. What is narrower crosses in two halves, so that it is summed in
float32: each island sends every other one its part of the sum (all-to-all), and then all send the
sums (all-gather). Numbers of "int8" and "int4" have a float32 scale for each block of them, which
travels with them.

>>> wire_bytes("int8", 512), wire_bytes("int4", 512), wire_bytes("bfloat16", 512)
(520, 264, 1024)

`read_exchange` reads an exchange as users pin it.

>>> read_exchange("exchange", "diloco:2:100").every
100
>>> read_exchange("exchange", "gossip:4:ring").graph
'ring'
>>> read_exchange("exchange", {"kind": "diloco", "islands": 4}).islands
4
>>> print(read_exchange("exchange", "diloco:4:50:momentum=0"))
diloco:4:50:momentum=0
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, fields
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, cast, get_args

from shardlib.errors import HINT, PAGES, PinError, raise_all
from shardlib.exchanges import Exact, Shown
from shardlib.untrusted.data import JsonObject, shown

# --------------------------------------------------------------------------------------------------
# Checks of the numbers of an exchange.


def whole(name: str, value: object, least: int, most: int | None = None) -> list[str]:
    """Checks a whole number of at least `least`; lists the faults."""
    limit = math.inf if most is None else most
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= limit:
        return []
    span = f"of at least {least}" if most is None else f"from {least} to {most}"
    return [f"{name} is {shown(value)}; it is an integer {span}"]


def between(
    name: str, value: object, *, most: float, above: bool, reached: bool = False
) -> list[str]:
    """Checks a number from 0 to less than `most`; above 0 where `above`; lists the faults."""
    number = (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    )
    fits = number <= most if reached else number < most
    if math.isfinite(number) and number >= 0 and fits and (number > 0 or not above):
        return []
    lower = "more than 0" if above else "at least 0"
    limit = f" and {'at most' if reached else 'less than'} {most:g}" if math.isfinite(most) else ""
    return [f"{name} is {shown(value)}; it is a number of {lower}{limit}"]


def one_of(name: str, value: object, words: Collection[str]) -> list[str]:
    """Checks a word; lists the faults."""
    if isinstance(value, str) and value in words:
        return []
    return [f"{name} is {shown(value)}; it is one of {', '.join(map(repr, words))}"]


# --------------------------------------------------------------------------------------------------
# A value as plain data, and as the command line spells it.


class Settings(Shown):
    """A frozen dataclass of settings with a word for its kind."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    kind: ClassVar[str]
    #: Settings whose values stand behind the kind without their names.
    places: ClassVar[tuple[str, ...]] = ()
    #: Whether there are outer parameters, which belong to all islands.
    keeps: bool = False

    def to_json(self) -> JsonObject:
        """The settings as plain data, with the kind."""
        return {"kind": self.kind, **asdict(self)}

    def __str__(self) -> str:
        """The kind and what stands in its place, then what differs from the defaults:
        "diloco:2:100:rate=0.5".
        """
        words = [self.kind, *(text(getattr(self, name)) for name in self.places)]
        words += [
            f"{field.name}={text(getattr(self, field.name))}"
            for field in fields(self)
            if field.name not in self.places and getattr(self, field.name) != field.default
        ]
        return ":".join(words)


def text(value: object) -> str:
    """A setting as it is spelled."""
    return f"{value:g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------------------------
# Training over a parameter server without a barrier, as one value.
#
# Workers fetch parameters from servers, compute gradients of rows of their own, and push them; the
# server applies each as it comes. Nobody waits for anybody. It is another optimizer than that of a
# step over the whole batch, and another kind of program, with processes of its own:
# `shardlib.islands.servers.train` runs it, and no plan has it.

#: How a server applies a gradient.
Rule = Literal["adagrad", "sgd"]
#: Most workers and servers: each is a process, and every worker is connected to every server.
MOST_WORKERS, MOST_SERVERS = 4096, 1024


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Settings):
    """Downpour SGD: workers push gradients to sharded parameter servers, with no barrier.

    Of a gradient that was computed with parameters fetched at a server's update t, and arrives
    there at update t + s, s is the *staleness*. With eta the rate, w the parameters:

        sgd      w <- w - eta' g,                     eta' = eta / (1 + s), or eta
        adagrad  a <- a + g^2,  w <- w - eta' g / sqrt(a + 1e-7)

    Dean et al., "Large Scale Distributed Deep Networks" (DistBelief, 2012), has the periods, the
    Adagrad per element and the warm start; Zhang et al. (arXiv:1511.05950) the rate by staleness;
    Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"
    (2013), the bound.

    Attributes:
        workers: processes that compute gradients, each with a program of its own.
        servers: processes that hold parameters, each an equal part of the elements.
        fetch: steps of a worker between two fetches.
        push: steps of a worker between two pushes; gradients in between are added up.
        bound: how many steps a worker may be ahead of the slowest that is there; None: any number.
        rule: "adagrad" or "sgd", at the server.
        rate: eta.
        by_staleness: whether a stale gradient is applied at the rate eta / (1 + s).
        warm: pushes of one worker, alone, before the others join.
        local_rate: of plain SGD at the worker between two fetches, as in DistBelief; 0 for none.
        accumulator: what Adagrad's sums of squares begin with.

    Raises:
        PinError: values out of range, or that contradict each other; all of them are listed.
    """

    kind: ClassVar[str] = "asynchronous"

    workers: int = 8
    servers: int = 2
    fetch: int = 1
    push: int = 1
    bound: int | None = None
    rule: Rule = "adagrad"
    rate: float = 0.05
    by_staleness: bool = True
    warm: int = 0
    local_rate: float = 0.0
    accumulator: float = 0.1

    def __post_init__(self) -> None:
        failures = [
            *whole("workers", self.workers, 1, MOST_WORKERS),
            *whole("servers", self.servers, 1, MOST_SERVERS),
            *whole("fetch", self.fetch, 1),
            *whole("push", self.push, 1),
            *([] if self.bound is None else whole("bound", self.bound, 0)),
            *between("rate", self.rate, most=math.inf, above=True),
            *whole("warm", self.warm, 0),
            *between("local_rate", self.local_rate, most=math.inf, above=False),
            *between("accumulator", self.accumulator, most=math.inf, above=False),
        ]
        if self.rule not in get_args(Rule):
            failures.append(f"rule is {shown(self.rule)}; it is 'adagrad' or 'sgd'")
        if not isinstance(self.by_staleness, bool):
            failures.append(f"by_staleness is {shown(self.by_staleness)}; it is True or False")
        if failures:
            raise_all(PinError, "exchange=Asynchronous is not usable", failures)
        if self.local_rate and self.fetch == 1:
            raise PinError(
                f"exchange=Asynchronous is not usable: local_rate is {self.local_rate:g}, and"
                " parameters are fetched before every step\nTry: fetch=2 or more, or local_rate=0"
            )
        for name in ("rate", "local_rate", "accumulator"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def __str__(self) -> str:
        """The kind, and what differs from the defaults."""
        usual = Asynchronous()
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(usual, field.name)
        ]
        return ":".join([self.kind, *changed])


def refuse_pin(word: str) -> NoReturn:
    """Says where training over a parameter server starts, to who pins it."""
    raise PinError(
        f"{word} is asynchronous, which is not a decision of a plan: workers and servers are"
        " processes of their own\nTry: shardlib.servers.train(job, steps,"
        f" exchange=shardlib.islands.Asynchronous(...)), see {PAGES}/parameter_server.html"
    )


# --------------------------------------------------------------------------------------------------
# Parts of parameters that cross together.

#: Bytes of a bucket, where nobody says otherwise: tensors are partitioned by 4 MB in ByteScheduler
#: (Peng et al., SOSP 2019), which take 3 ms of a link of 10 Gbit/s.
BUCKET_BYTES = 4 << 20
#: The least: smaller messages are mostly what stands around them.
LEAST_BUCKET_BYTES = 1 << 12


def wrong_bucket_bytes(value: object) -> list[str]:
    """Lists the faults in the bytes of a bucket, for an error."""
    if type(value) is int and value >= LEAST_BUCKET_BYTES:
        return []
    return [f"bucket_bytes is {shown(value)}; it is an integer of at least {LEAST_BUCKET_BYTES}"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements of one parameter.

    Attributes:
        path: dotted path of the parameter.
        start: the first of its elements.
        stop: the one behind the last.
    """

    path: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.path}[{self.start}:{self.stop}]"


# --------------------------------------------------------------------------------------------------
# Islands that average with neighbours.

#: Who hears whom.
GRAPHS = ("exponential", "ring")


@dataclass(frozen=True, kw_only=True)
class Gossip(Settings):
    """Islands train apart and average their parameters with neighbours, after every step or every
    so many; there are no outer parameters. Weights of what is averaged sum to one over what an
    island hears and over who hears it, so that the mean over islands stays as it is.

    "exponential": one peer at a time, at distance 1, 2, 4, ... in turn, half and half; after as
    many meetings as there are distances all islands have the mean (stochastic gradient push, Assran
    et al., arXiv:1811.10792, whose weights stay 1 here). "ring": both neighbours, a third each
    (D-PSGD, Lian et al., arXiv:1705.09056).

    Attributes:
        islands: their number, at least 2 and a power of two for "exponential", at least 3 for
            "ring"; they divide the machine and the rows of the batch.
        graph: "exponential" or "ring".
        every: steps between two meetings.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "gossip"
    places: ClassVar[tuple[str, ...]] = ("islands", "graph")
    #: Islands wait for what crosses.
    delay = 0

    islands: int = 8
    graph: str = "exponential"
    every: int = 1

    def __post_init__(self) -> None:
        failures = [
            *whole("islands", self.islands, 2),
            *one_of("graph", self.graph, GRAPHS),
            *whole("every", self.every, 1),
        ]
        if not failures and self.graph == "exponential" and self.islands & (self.islands - 1):
            failures.append(
                f"islands is {self.islands}; over an exponential graph it is a power of two, since"
                " others never reach the mean"
            )
        if not failures and self.graph == "ring" and self.islands < 3:
            failures.append(f"islands is {self.islands}; a ring has at least 3")
        if failures:
            raise_all(PinError, "exchange=Gossip is not usable", failures)

    @property
    def meetings(self) -> int:
        """Number of meetings that differ: at one distance each."""
        return self.islands.bit_length() - 1 if self.graph == "exponential" else 1

    @property
    def period(self) -> int:
        """Steps between two meetings at the same distance."""
        return self.every * self.meetings

    @property
    def heard(self) -> int:
        """Number of islands that one hears at a meeting."""
        return 1 if self.graph == "exponential" else 2

    def distances(self, meeting: int) -> tuple[int, ...]:
        """Returns the distances of the islands that an island hears, with a weight of 1 / (their
        number + 1) each.

        >>> [Gossip().distances(meeting) for meeting in range(3)]
        [(1,), (2,), (4,)]

        Args:
            meeting: 0 to `meetings` - 1.
        """
        return (1 << meeting,) if self.graph == "exponential" else (1, self.islands - 1)

    def due(self, step: int) -> int | None:
        """The meeting after a step; None where there is none.

        Args:
            step: number of steps done.
        """
        return None if step % self.every else (step // self.every - 1) % self.meetings

    def met(self, step: int) -> int:
        """Number of meetings so far.

        Args:
            step: number of steps done.
        """
        return step // self.every


#: Bits of a number, by the word for a wire.
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
WIRES = tuple(BITS)
#: Numbers that share a scale, and bytes of the scale.
BLOCK, SCALE = 256, 4


def spaces(wire: str, sizes: Iterable[int], block: int = BLOCK) -> list[int]:
    """Number of places of each array: whole blocks, so that scales are those of one array, and
    devices that hold the same of it send the same.
    """
    each = block if blocks(wire) else 1
    return [-(-size // each) * each for size in sizes]


def padded(wire: str, sizes: Iterable[int], islands: int, block: int = BLOCK) -> int:
    """Number of elements that are sent: a whole number of blocks for every island."""
    count = sum(spaces(wire, sizes, block))
    if wire == "float32":
        return count
    part = islands * (block if blocks(wire) else 1)
    return -(-count // part) * part


def blocks(wire: str) -> bool:
    """Returns whether numbers share scales."""
    return wire in ("int8", "int4")


def wire_bytes(wire: str, count: int, block: int = BLOCK) -> int:
    """Bytes of so many numbers, with their scales."""
    return count * BITS[wire] // 8 + (SCALE * count // block if blocks(wire) else 0)


# --------------------------------------------------------------------------------------------------
# Ways to send less of a gradient. What is not sent stays on its island as a residual, and is added
# to the gradient of the next step (error feedback).
#
# Sizes are of what one device holds: every device compresses its shard, but for `PowerSGD`, which
# approximates whole matrices.

#: Densities of the warm-up of Lin et al., each for as many steps.
WARM_UP = (0.25, 0.0625, 0.015625, 0.004)


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Settings):
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


@dataclass(frozen=True, kw_only=True)
class TopK(Settings):
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
        """Number of elements sent of `count`.

        Args:
            count: of a device's shard.
            stage: of the warm-up; the last is that of all other steps.
        """
        return min(count, math.ceil(count * self.densities[stage]))


@dataclass(frozen=True)
class Quantised(Settings):
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


@dataclass(frozen=True, kw_only=True)
class Sign(Settings):
    """Signs alone, times the mean of the absolute numbers of a parameter (EF-SignSGD, Karimireddy
    et al., arXiv:1901.09847): a bit a number.
    """

    kind: ClassVar[str] = "sign"
    stages: ClassVar[int] = 1


Compressor: TypeAlias = PowerSGD | TopK | Quantised | Sign
#: Compressors by the word with which they are pinned.
COMPRESSORS: dict[str, type[PowerSGD] | type[TopK] | type[Quantised] | type[Sign]] = {
    form.kind: form for form in (PowerSGD, TopK, Quantised, Sign)
}


# --------------------------------------------------------------------------------------------------
# Islands that exchange compressed gradients in every step.

#: What islands send unless something else is said.
RANK_FOUR = PowerSGD(rank=4)


@dataclass(frozen=True, kw_only=True)
class Compressed(Settings):
    """Islands exchange their gradients in every step, compressed, and all update by their mean:
    parameters stay alike on all islands, as with one optimizer of the whole batch.

    Attributes:
        islands: their number, at least 2; they divide the machine and the rows of the batch.
        by: how gradients are compressed.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "compressed"
    places: ClassVar[tuple[str, ...]] = ("islands", "by")
    #: Steps between two exchanges, also alike ones; islands wait for what crosses.
    every: ClassVar[int] = 1
    period = 1
    delay = 0

    islands: int = 2
    by: Compressor = RANK_FOUR

    def __post_init__(self) -> None:
        failures = whole("islands", self.islands, 2)
        if not isinstance(self.by, PowerSGD | TopK | Quantised | Sign):
            failures.append(
                f"by is {shown(self.by)}; it is PowerSGD(rank=4), TopK(), Quantised('int8') or"
                " Sign() of shardlib.islands"
            )
        elif isinstance(self.by, TopK) and not failures:
            sent = 2 * self.islands * self.by.density
            if sent >= 1 and self.by.density < 1:
                failures.append(
                    f"density is {self.by.density:g}; {self.islands} islands that send numbers and"
                    f" their places send more than all numbers from {1 / (2 * self.islands):g} on"
                )
        if failures:
            raise_all(PinError, "exchange=Compressed is not usable", failures)

    @property
    def meetings(self) -> int:
        """Number of exchanges that differ: one for each density of a warm-up."""
        return self.by.stages

    def due(self, step: int) -> int:
        """Returns the number of the exchange of a step.

        Args:
            step: 1 for the first.
        """
        return self.by.stage(step) if isinstance(self.by, TopK) else 0

    def met(self, step: int) -> int:
        """Number of exchanges so far.

        Args:
            step: number of steps done.
        """
        return step

    @classmethod
    def read(cls, settings: Mapping[str, object]) -> Compressed:
        """The exchange of settings of its own and of its compressor.

        >>> print(Compressed.read({"islands": 4, "by": "topk", "density": 0.01}))
        compressed:4:topk:density=0.01

        Args:
            settings: as pins say them.

        Raises:
            PinError: there is no such compressor, or it has no such settings.
        """
        options = dict(settings)
        by = options.pop("by", PowerSGD.kind)
        own_settings = {"islands": options.pop("islands")} if "islands" in options else {}
        if isinstance(by, Mapping):
            options |= dict(cast("Mapping[str, Any]", by))
            by = options.pop("kind", None)
        if isinstance(by, str):
            by = _compressor(by, options)
        elif options:
            raise PinError(f"compressed has islands and by, and not {', '.join(sorted(options))}")
        return cls(**own_settings, by=by)  # type: ignore[arg-type]  (checked when it is made)

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind, "islands": self.islands, "by": self.by.to_json()}


def _compressor(kind: str, settings: Mapping[str, Any]) -> Compressor:
    if kind not in COMPRESSORS:
        near = difflib.get_close_matches(kind, COMPRESSORS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        if kind in ("int8", "int4"):
            meant = f"; did you mean 'quantised{':dtype=int4' if kind == 'int4' else ''}'?"
        raise PinError(f"by is {shown(kind)}; it is one of {', '.join(COMPRESSORS)}{meant}")
    form = COMPRESSORS[kind]
    if wrong := _unknown_settings(form, settings):
        raise PinError(f"by={kind} {wrong}")
    return form(**settings)


def _unknown_settings(form: Any, settings: Mapping[str, Any]) -> str:
    """Names the settings of a kind and those that it lacks; "" where it lacks none."""
    names = [field.name for field in fields(form)]
    strange = sorted(str(name) for name in settings if name not in names)
    has = f"has {', '.join(names)}" if names else "has no settings"
    return f"{has}, and not {', '.join(strange)}" if strange else ""


# --------------------------------------------------------------------------------------------------
# Islands that train apart and meet every so many steps.

#: Part of its own parameters that an island keeps, as in arXiv:2501.18512.
MIXING = 0.5


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Settings):
    """Islands train apart, each with its part of the batch, and meet every so many steps.

    With theta the outer parameters, theta_k those of island k and v a momentum (Douillard et al.,
    "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105):

        d = theta - mean of theta_k,   v <- d + momentum v,   theta <- theta - rate (d + momentum v)

    and all islands go on from theta. Optimizer state stays on its island. `rate=1, momentum=0` is
    local SGD (arXiv:1805.09767): the mean of the parameters. Of several fragments one meets at a
    time, evenly spread over the `every` steps (Streaming DiLoCo, arXiv:2501.18512), so that less
    crosses at once.

    With a delay, what an island sends crosses beside its next steps. When it is there, the outer
    update is done, and islands go on from

        mixing theta_k + (1 - mixing) theta

    Attributes:
        islands: their number, at least 2; they divide the machine and the rows of the batch.
        every: steps between two meetings about the same parameters.
        rate: of the outer update.
        momentum: of the outer update, in Nesterov's form.
        fragments: parts of the parameters that meet apart; they divide `every`.
        wire: dtype of outer gradients as they cross: "float32", "bfloat16", or "int8" and "int4"
            in blocks of 256 with a scale each; they are summed in float32.
        delay: steps that islands do while outer gradients cross, at most until the next are sent;
            0: they wait.
        mixing: part of its own parameters that an island keeps after a delay, 0 to less than 1.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "diloco"
    keeps = True
    places: ClassVar[tuple[str, ...]] = ("islands", "every")
    islands: int = 2
    every: int = 100
    rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    wire: str = "float32"
    delay: int = 0
    mixing: float = MIXING

    def __post_init__(self) -> None:
        failures = [
            *whole("islands", self.islands, 2),
            *whole("every", self.every, 1),
            *between("rate", self.rate, most=math.inf, above=True),
            *between("momentum", self.momentum, most=1.0, above=False),
            *whole("fragments", self.fragments, 1),
            *one_of("wire", self.wire, WIRES),
            *whole("delay", self.delay, 0),
            *between("mixing", self.mixing, most=1.0, above=False),
        ]
        if not failures and self.every % self.fragments:
            failures.append(
                f"every is {self.every}, which {self.fragments} fragments do not divide: one meets"
                " after every so many steps"
            )
        if not failures and self.delay > self.between:
            failures.append(
                f"delay is {self.delay}, and the next outer gradients are sent after {self.between}"
                " steps: at most that many"
            )
        if not failures and self.mixing != MIXING and not self.delay:
            failures.append(
                f"mixing is {self.mixing:g} without a delay, where islands go on from outer"
                " parameters: a delay of at least 1, or no mixing"
            )
        if failures:
            raise_all(PinError, "exchange=DiLoCo is not usable", failures)
        object.__setattr__(self, "mixing", float(self.mixing))
        object.__setattr__(self, "rate", float(self.rate))
        object.__setattr__(self, "momentum", float(self.momentum))

    @property
    def meetings(self) -> int:
        """Number of meetings that differ: about one fragment each."""
        return self.fragments

    @property
    def period(self) -> int:
        """Steps between two meetings about the same fragment."""
        return self.every

    @property
    def between(self) -> int:
        """Steps between two meetings."""
        return self.every // self.fragments

    def due(self, step: int) -> int | None:
        """The meeting after a step, or what is sent then where there is a delay; None where there
        is none.

        >>> [DiLoCo(every=4, fragments=2).due(step) for step in range(1, 9)]
        [None, 0, None, 1, None, 0, None, 1]

        Args:
            step: number of steps done.
        """
        return None if step % self.between else self.fragment(step // self.between)

    def fragment(self, number: int) -> int:
        """The fragment of a meeting.

        Args:
            number: of the meeting, from 1 on.
        """
        return (number - 1) % self.fragments

    def met(self, step: int) -> int:
        """Number of meetings so far, of those whose outer gradients have arrived.

        Args:
            step: number of steps done.
        """
        return max(0, step - self.delay) // self.between


# --------------------------------------------------------------------------------------------------
# Kinds of exchanges, and how they are read.
#
# *Outer* is what belongs to all islands: its parameters are those that all start the next round
# from. Signs and words are those of DiLoCo: the outer gradient is outer parameters minus the mean
# of the islands' parameters.


#: How islands that train apart meet.
Meets: TypeAlias = DiLoCo | Gossip
#: How several islands train.
Several: TypeAlias = Meets | Compressed
Form: TypeAlias = type[Exact] | type[DiLoCo] | type[Gossip] | type[Compressed]
#: Exchanges by the word with which they are pinned.
KINDS: dict[str, Form] = {form.kind: form for form in (Exact, DiLoCo, Gossip, Compressed)}


#: How pins spell exchanges.
EXAMPLES = (
    "'exact', 'diloco:2:100' (islands, steps between meetings), 'gossip:8:exponential' (islands,"
    " graph), 'compressed:2:powersgd' (islands, how), shardlib.islands.DiLoCo(islands=2)"
)


def read_exchange(word: str, value: object) -> Exact | Several:
    """An exchange of a value, a word, or plain data."""
    if isinstance(value, Exact | DiLoCo | Gossip | Compressed):
        return value
    if isinstance(value, Asynchronous):
        refuse_pin(word)
    if isinstance(value, str):
        kind, *parts = value.lower().split(":")
        form = _form(word, value, kind)
        return _made(word, value, form, _settings(word, value, form, parts))
    if isinstance(value, Mapping):
        options = dict(cast("Mapping[str, Any]", value))
        return _made(word, value, _form(word, value, options.pop("kind", None)), options)
    raise PinError(f"{word} is {shown(value)}; it is one of {EXAMPLES}")


def _form(word: str, value: object, kind: object) -> Form:
    """The type of the exchanges of a kind."""
    if kind == Asynchronous.kind:
        refuse_pin(word)
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    near = difflib.get_close_matches(str(kind), KINDS, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise PinError(f"{word} is {shown(value)}; it is one of {EXAMPLES}{meant}")


def _settings(word: str, value: str, form: Form, parts: list[str]) -> dict[str, Any]:
    """Settings of what stands after the kind: some by their places, then name=value."""
    settings: dict[str, Any] = {}
    for place, text in enumerate(parts):
        name, named, setting = text.rpartition("=")
        if not named and place >= len(form.places):
            first_name = next(
                (field.name for field in fields(form) if field.name not in form.places), ""
            )
            hint = f"{HINT}{first_name}={text}" if first_name else f"; {form.kind} has no settings"
            raise PinError(f"{word} is {shown(value)}, whose part {text!r} has no name{hint}")
        name = name if named else form.places[place]
        if name in settings:
            raise PinError(f"{word} is {shown(value)}, which says {name} twice{HINT}{name} once")
        settings[name] = _read(setting)
    return settings


def _read(text: str) -> int | float | str:
    """A number, or the word that it is."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _made(word: str, value: object, form: Form, settings: dict[str, Any]) -> Exact | Several:
    """The exchange of a kind with settings."""
    if form is Compressed:
        return Compressed.read(settings)
    if wrong := _unknown_settings(form, settings):
        raise PinError(f"{word} is {shown(value)}; {form.kind} {wrong}")
    return form(**settings)
