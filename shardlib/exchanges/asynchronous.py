"""Training over a parameter server without a barrier, as one value.

Workers fetch parameters from servers, compute gradients of rows of their own, and push them; the
server applies each as it comes. Nobody waits for anybody. It is another optimizer than that of a
step over the whole batch, and another kind of program, with processes of its own:
`shardlib.servers.train` runs it, and no plan has it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Literal, NoReturn, get_args

from shardlib.errors import PinError, raise_all
from shardlib.untrusted.json_types import JsonObject
from shardlib.untrusted.shown import shown

#: How a server applies a gradient.
Rule = Literal["adagrad", "sgd"]
#: Most workers and servers: each is a process, and every worker is connected to every server.
MOST_WORKERS, MOST_SERVERS = 4096, 1024


def _whole(name: str, value: object, minimum: int, maximum: int | None = None) -> list[str]:
    """What is wrong with a whole number."""
    limit = math.inf if maximum is None else maximum
    if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= limit:
        return []
    span = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return [f"{name} is {shown(value)}; it is an integer {span}"]


def _real(name: str, value: object, *, above: bool) -> list[str]:
    """What is wrong with a finite number of at least 0, or above it."""
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    if math.isfinite(number) and (number > 0 if above else number >= 0):
        return []
    return [f"{name} is {shown(value)}; it is a number of {'more than' if above else 'at least'} 0"]


@dataclass(frozen=True, kw_only=True)
class Asynchronous:
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
            *_whole("workers", self.workers, 1, MOST_WORKERS),
            *_whole("servers", self.servers, 1, MOST_SERVERS),
            *_whole("fetch", self.fetch, 1),
            *_whole("push", self.push, 1),
            *([] if self.bound is None else _whole("bound", self.bound, 0)),
            *_real("rate", self.rate, above=True),
            *_whole("warm", self.warm, 0),
            *_real("local_rate", self.local_rate, above=False),
            *_real("accumulator", self.accumulator, above=False),
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

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind, **asdict(self)}

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
        f"{word} is asynchronous, which is no decision of a plan: workers and servers are processes"
        " of their own\nTry: shardlib.servers.train(job, steps,"
        " exchange=shardlib.Asynchronous(...)), see docs/parameter_server.md"
    )
