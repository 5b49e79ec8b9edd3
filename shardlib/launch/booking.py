"""Booking: machines for a run, and runs for a machine.

    from shardlib import booking

    target = booking.Target(tokens=15e12, deadline=30 * booking.DAY, prices={"h100": 2.40})
    kinds = ["h100:8", "v5p"]
    print(booking.compare(init, loss, optimizer, batch, topologies=kinds, target=target))

A `family` has models of one shape and many sizes. It is a decoder that is known, made wider and
deeper together: the width of a head, the number of key heads, the ratio of feed-forward to width,
vocabulary and everything else stay; the ratio of width to layers stays near that of the original.
The loss of a transformer hardly depends on its shape while the number of parameters stays (J.
Kaplan et al., "Scaling laws for neural language models", arXiv:2001.08361, section 3.1: a few
percent over a factor of forty in that ratio).

>>> from shardlib.models import PRESETS
>>> sizes = family(PRESETS["llama3-8b"], 1.2e9, 1.3e9)
>>> [(one.embed, one.layers, round(one.parameter_count() / 1e9, 2)) for one in sizes]
[(2048, 12, 1.2), (2048, 13, 1.26)]

`machines` lists the sizes in which a kind of machine is had. GPUs come in full fast domains, or one
part of a domain; TPUs in slices, up to the largest, and in several of the largest. Sizes are at
most an eighth apart, where there are such machines.

>>> [machine.name for machine in machines("h100:8", 48)]
['h100:1', 'h100:2', 'h100:4', 'h100:8', '2*h100:8', '3*h100:8', '4*h100:8', '5*h100:8', '6*h100:8']
>>> [machine.name for machine in machines("v6e", 1024)][-4:]
['v6e:16x16', '2*v6e:16x16', '3*v6e:16x16', '4*v6e:16x16']

A `Target` is the work of a run, its deadline, and the prices of machines.

>>> Target(tokens=15e12, deadline=30 * DAY, prices={"h100": 2.4}).price("h100", 1)
2.4
>>> failures = Failures(every=3 * 3600.0, devices=16384)
>>> failures.of(8192) / 3600  # half the devices fail half as often
6.0
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import optax

from shardlib.annotation.model import Init
from shardlib.annotation.trees import Filter, Tree
from shardlib.cost.tables import Pricer
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import ArgumentError, InfeasibleError, PinError, TopologyError, raise_all
from shardlib.frontend.model import Loss, problem, require_arguments
from shardlib.graph import Problem
from shardlib.machines.catalog import CATALOG
from shardlib.machines.topology import CUBE, Topology, TopologyLike, of_size
from shardlib.machines.topology import topology as parse_topology
from shardlib.models import build, example_batch
from shardlib.models.config import EncoderDecoderConfig, TransformerConfig
from shardlib.models.presets import UserModel, load
from shardlib.planner.answers import DAY, RunCost, run_cost
from shardlib.planner.plan import RESTART_S, Plan
from shardlib.planner.priced import UnshardedBounds
from shardlib.planner.search import prepared_workload, search
from shardlib.planner.space import spaces
from shardlib.planner.workload import Workload
from shardlib.report.elements import (
    aligned,
    count_text,
    parameters_text,
    percent_text,
    seconds_text,
    wrapped,
)
from shardlib.report.markup import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Box,
    LogAxis,
    render,
)
from shardlib.untrusted.data import JsonObject, shown

__all__ = [
    "DAY",
    "Budget",
    "Comparison",
    "Failures",
    "Fitted",
    "Offer",
    "Offers",
    "Target",
    "compare",
    "fit_model",
]

#: Heads that a width is a multiple of, where each has its own keys: so many devices may share them.
HEADS = 8
#: Widths of the feed-forward are multiples of this where the known one is.
MLP = 256


def family(
    model: TransformerConfig | EncoderDecoderConfig | UserModel, smallest: float, largest: float
) -> list[TransformerConfig]:
    """Models of the shape of a known one, the smallest first."""
    if not isinstance(model, TransformerConfig) or model.experts or model.latent:
        raise ArgumentError(
            f"{model.name} names no family: sizes are those of a dense decoder, and of no"
            " user's own function\nTry: llama3-8b, or a .toml card"
        )
    models: list[TransformerConfig] = []
    unit, width = _unit(model), 0
    while True:
        width += unit
        sizes = [_resized(model, width, layers) for layers in _layers(model, width, unit)]
        if sizes and sizes[0].parameter_count() > largest:
            break
        models += [size for size in sizes if smallest <= size.parameter_count() <= largest]
    return sorted(models, key=TransformerConfig.parameter_count)


def _unit(model: TransformerConfig) -> int:
    """Returns the number that widths are multiples of."""
    multi_head = model.kv_heads == model.heads
    return model.head_dim * (math.gcd(HEADS, model.heads) if multi_head else model.kv_heads)


def _layers(model: TransformerConfig, width: int, unit: int) -> range:
    """Numbers of layers for which this width is nearer to the known shape than the next: parameters
    of the layers grow with layers times the square of the width, those of the shape with its cube.
    """
    ratio = model.layers / model.embed / width**2
    low, high = ((width + side * unit / 2) ** 3 * ratio for side in (-1, 1))
    return range(max(1, math.ceil(low)), math.ceil(high))


def _resized(model: TransformerConfig, width: int, layers: int) -> TransformerConfig:
    heads = width * model.heads // model.embed
    step = MLP if model.mlp % MLP == 0 else 1
    sized = replace(
        model,
        embed=width,
        layers=layers,
        heads=heads,
        kv_heads=heads if model.kv_heads == model.heads else model.kv_heads,
        mlp=max(step, round(model.mlp / model.embed * width / step) * step),
    )
    return replace(sized, name=f"{model.name} at {parameters_text(sized.parameter_count())}")


#: Steps of a doubling.
STEPS = 8


def spelled(text: str) -> str:
    """A member of a family, where only its chip is named: "v5p" is "v5p:4x4x4"."""
    return CATALOG[text].example if text in CATALOG else text


def machines(family: str | Topology, largest: int) -> list[Topology]:
    """Machines of a family, ascending."""
    member = parse_topology(spelled(family) if isinstance(family, str) else family)
    if "@" in member.name:
        raise ArgumentError(
            f"{member.name} names the link between its parts, and its sizes are not listed\nTry: a"
            " chip, or one fast domain of it: h100:8"
        )
    by_devices = {
        machine.devices: machine
        for devices in _counts(member, largest)
        if (machine := _member(member, devices)) is not None
    }
    if not by_devices:
        raise ArgumentError(
            f"{member.name} has no machine of at most {largest:,} devices\nTry: a larger limit"
        )
    return [by_devices[devices] for devices in sorted(by_devices)]


def _member(member: Topology, devices: int) -> Topology | None:
    """The machine of that size; None where there is none, or only in needlessly small slices."""
    try:
        machine = of_size(member, devices)
    except TopologyError:
        return None
    product = CATALOG.get(member.chip.name)
    if product is None or product.dims == 1 or machine.devices <= _slice(member):
        alone = ":" in machine.name and "*" not in machine.name
        return machine if product is None or product.dims == 1 or alone else None
    return machine if machine.devices % _slice(member) == 0 else None


def _slice(member: Topology) -> int:
    """Devices of the largest part inside of which links are fast, as the family is counted."""
    product = CATALOG.get(member.chip.name)
    if product is None or product.dims == 1:
        return member.devices // member.tiers[0].devices if len(member.tiers) > 1 else 1
    limit, per_chip = product.most, member.chip.devices_per_chip
    chips = max(
        (1 << power for power in range(limit.bit_length()) if 1 << power <= limit), default=1
    )
    while chips > 1:
        name = _name(member, chips * per_chip)
        if name is not None and "*" not in name:
            return chips * per_chip
        chips //= 2
    return per_chip


def _name(member: Topology, devices: int) -> str | None:
    try:
        return of_size(member, devices).name
    except TopologyError:
        return None


def _counts(member: Topology, largest: int) -> Iterator[int]:
    """Numbers of devices to ask for, whether or not there are such machines."""
    product = CATALOG.get(member.chip.name)
    if product is None:  # a machine of one's own, by its outermost parts
        yield from (unit for unit in _multiples(_slice(member), largest))
        return
    per_chip = member.chip.devices_per_chip
    if product.dims == 1:
        domain = member.tiers[-1].devices if len(member.tiers) > 1 else product.most
        yield from (n for n in _powers() if n < domain and n <= largest)
        yield from _multiples(domain, largest)
        return
    full = _slice(member)
    yield from (n * per_chip for n in _powers() if n * per_chip <= min(full, largest))
    if product.dims == 3:  # slices are made of cubes
        yield from _multiples(CUBE * per_chip, min(full, largest))
    yield from _multiples(full, largest)


def _powers() -> Iterator[int]:
    return (1 << power for power in itertools.takewhile(lambda p: p < 40, itertools.count()))


def _multiples(unit: int, largest: int) -> Iterator[int]:
    """Multiples of a unit up to a limit: all of the first, then at most an eighth apart."""
    count = 1
    while count * unit <= largest:
        yield count * unit
        count += max(1, (1 << int(math.log2(count))) // STEPS)


def days_text(seconds: float) -> str:
    """Days, or a shorter unit below one.

    >>> days_text(3 * DAY), days_text(60.0)
    ('3.0 days', '60.0 s')
    """
    return f"{seconds / DAY:,.1f} days" if seconds >= DAY else seconds_text(seconds)


def _not_positive(figures: Mapping[str, object]) -> list[str]:
    """Lists the figures that are not finite numbers above 0."""
    return [
        f"{name} is {value!r:.40}; it is a number above 0"
        for name, value in figures.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
    ]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """The mean time between failures of a machine of some size; larger ones fail oftener in
    proportion.

    Attributes:
        every: seconds between two failures of a machine.
        devices: that this machine has.
    """

    every: float
    devices: int

    def __post_init__(self) -> None:
        if wrong := _not_positive({"every": self.every, "devices": self.devices}):
            raise_all(ArgumentError, "failures are not defined", wrong)

    def of(self, devices: int) -> float:
        """Seconds between two failures of a machine of so many devices."""
        return self.every * self.devices / devices


@dataclass(frozen=True, kw_only=True)
class Target:
    """A training run that has to end in time.

    Attributes:
        tokens: of the whole run.
        deadline: seconds until it has to be done.
        prices: chip of the catalogue -> price of one such chip and hour, in money of your own; for
            chips that are not here, device-hours are compared, and no price is built in.
        failures: how often machines fail; None where nothing fails.
        restart: seconds from a failure to the next step.

    Raises:
        ArgumentError: numbers that are not positive, or prices of unknown chips; all are listed.
    """

    tokens: float
    deadline: float
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    failures: Failures | None = None
    restart: float = RESTART_S

    def __post_init__(self) -> None:
        figures = {"tokens": self.tokens, "deadline": self.deadline, "restart": self.restart}
        figures |= {f"the price of {chip}": price for chip, price in self.prices.items()}
        wrong = _not_positive(figures)
        wrong += [
            f"the price of {shown(str(chip))}: no such chip; there are {', '.join(CATALOG)}"
            for chip in self.prices
            if chip not in CATALOG
        ]
        if wrong:
            raise_all(ArgumentError, "the target is not defined", wrong)

    def price(self, chip: str, devices_per_chip: int) -> float | None:
        """Of a device and hour; None where the chip has none."""
        chip_price = self.prices.get(chip)
        return None if chip_price is None else chip_price / devices_per_chip

    def mtbf(self, devices: int) -> float | None:
        """Seconds between two failures of a machine of so many devices; None without failures."""
        return None if self.failures is None else self.failures.of(devices)

    @property
    def days(self) -> float:
        """Until the deadline."""
        return self.deadline / DAY

    def to_json(self) -> JsonObject:
        """The target as plain data."""
        return {
            "tokens": self.tokens,
            "deadline_seconds": self.deadline,
            "prices": dict(self.prices),
            "mtbf": None
            if self.failures is None
            else {"seconds": self.failures.every, "devices": self.failures.devices},
            "restart_seconds": self.restart,
        }


# --------------------------------------------------------------------------------------------------
# Offers: the machines of one family for a run, with every size that was looked at, and the choice.
#
# Which sizes miss the deadline is proven, not assumed: each is planned by a search that is exact
# within the cost model, or so small that the kernels alone, spread equally over its devices with
# no communication, take too long (`shardlib.planner.questions`). That larger machines are faster
# is assumed nowhere.


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A machine of some size, and what the run takes on it.

    Attributes:
        topology: spelling of the machine.
        devices: that are paid for; a plan may use fewer.
        plan: the best plan; None where there is none.
        cost: of the run; None where there is no plan, or where failures let no run end.
        deadline: seconds.
        message: why there is no plan or no cost.
    """

    topology: str
    devices: int
    plan: Plan | None = field(default=None, repr=False)
    cost: RunCost | None = None
    deadline: float
    message: str = ""

    @property
    def meets(self) -> bool:
        """True if the run ends in time."""
        return self.cost is not None and self.cost.wall_seconds <= self.deadline

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of all devices that are paid for."""
        if self.plan is None:
            return 0.0
        return self.plan.estimate.mfu * self.plan.mesh.devices / self.devices

    def to_json(self) -> JsonObject:
        """The offer as plain data."""
        data: JsonObject = {
            "topology": self.topology,
            "devices": self.devices,
            "meets_deadline": self.meets,
        }
        if self.plan is None or self.cost is None:
            return {**data, "message": self.message}
        search = self.plan.search
        return {
            **data,
            "mesh": dict(self.plan.mesh),
            "digest": self.plan.digest,
            "mfu": self.mfu,
            "run": self.cost.to_json(),
            "search": {
                "gap": search.gap,
                "candidates": search.candidates,
                "evaluations": search.evaluations,
            },
        }


@dataclass(frozen=True, kw_only=True)
class Offers:
    """The machines of one family for a run.

    Attributes:
        family: as it was asked for.
        tried: sizes that were planned, ascending.
        excluded: spellings of sizes that a bound says are too small, ascending.
        unseen: sizes above the smallest that meets the deadline and that were not planned.
        least_device_hours: of the kernels alone; no size needs fewer.
    """

    family: str
    tried: tuple[Offer, ...]
    excluded: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    least_device_hours: float

    @property
    def in_time(self) -> tuple[Offer, ...]:
        """Sizes that meet the deadline."""
        return tuple(offer for offer in self.tried if offer.meets)

    @property
    def smallest(self) -> Offer | None:
        """The fewest devices that meet the deadline; None where none do."""
        return min(self.in_time, key=lambda offer: offer.devices, default=None)

    @property
    def cheapest(self) -> Offer | None:
        """The fewest device-hours within the deadline, of the sizes that were planned; all devices
        of a family cost the same. The smaller one where two are equal.
        """
        return min(
            self.in_time, key=lambda offer: (device_hours(offer), offer.devices), default=None
        )

    @property
    def gap(self) -> float | None:
        """Part of the cheapest one's device-hours that no other size could save more of; None where
        no size meets the deadline.
        """
        best = self.cheapest
        if best is None:
            return None
        return max(0.0, 1 - self.least_device_hours / device_hours(best))

    @property
    def certificate(self) -> str:
        """The parts of the choice that are proven, and those that were only tried, in a sentence or
        two.
        """
        missed = [offer for offer in self.tried if not offer.meets]
        first = self.smallest
        below = [offer for offer in missed if first is None or offer.devices < first.devices]
        reasons: list[str] = []
        if self.excluded:
            reasons.append(
                f"up to {self.excluded[-1]} the kernels alone take too long ({len(self.excluded)}"
                " sizes, not planned)"
            )
        if below:
            reasons.append(f"planned, and not in time: {_all_missed(below)}")
        if first is None:
            return (
                f"no size meets the deadline: {'; '.join(reasons)}" if reasons else "no size at all"
            )
        proof = f"{first.topology} is the smallest, proven: {'; '.join(reasons) or 'no other size'}"
        others = len(self.in_time) - 1
        best = self.cheapest
        assert best is not None and self.gap is not None
        least, less = ("is the cheapest", "be over {} cheaper")
        if money(best) is None:
            least, less = ("needs the fewest device-hours", "need over {} fewer")
        return (
            f"{proof}. {best.topology} {least} of {others + 1} sizes in time that were planned, and"
            f" no size could {less.format(percent_text(self.gap))}, as its kernels alone take the"
            " rest"
        )

    def to_json(self) -> JsonObject:
        """The offers as plain data."""
        smallest, cheapest = self.smallest, self.cheapest
        return {
            "family": self.family,
            "smallest": None if smallest is None else smallest.to_json(),
            "cheapest": None if cheapest is None else cheapest.to_json(),
            "cheapest_gap": self.gap,
            "least_device_hours": self.least_device_hours,
            "certificate": self.certificate,
            "planned": [offer.to_json() for offer in self.tried],
            "excluded": list(self.excluded),
            "not_planned": list(self.unseen),
        }


def device_hours(offer: Offer) -> float:
    """Hours of devices that are paid for, used or not; infinite where there is no cost."""
    return math.inf if offer.cost is None else offer.cost.device_hours


def _all_missed(offers: Sequence[Offer]) -> str:
    """Sizes that miss the deadline; of many the first, the fastest and the last."""
    if len(offers) <= 4:
        return ", ".join(map(_missed, offers))
    first, *_, last = offers
    timed = [offer for offer in offers if offer.cost is not None]
    best = min(timed, key=lambda o: o.cost.wall_seconds if o.cost else math.inf, default=last)
    named = dict.fromkeys([first.topology, last.topology, best.topology])
    shown = [_missed(offer) for offer in offers if offer.topology in named]
    return f"{len(offers)} sizes, among them {', '.join(shown)}"


def _missed(offer: Offer) -> str:
    """A size that misses the deadline, with the reason."""
    if offer.cost is None:
        return f"{offer.topology} ({offer.message})"
    return f"{offer.topology} ({days_text(offer.cost.wall_seconds)})"


HEAD = ("machine", "", "devices", "days", "device-hours", "cost", "MWh", "MFU", "mesh")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Families of machines for one run; `print` shows a table, a notebook the picture.

    Attributes:
        model: its name.
        target: tokens, deadline, prices, failures.
        tokens_per_step: of the global batch, which is the same everywhere.
        families: in the order in which they were asked for.
    """

    model: str
    target: Target
    tokens_per_step: int
    families: tuple[Offers, ...]

    @property
    def cheapest(self) -> Offer | None:
        """The least money of all; None where a family that meets the deadline has no price, or
        none meets it.
        """
        offers = [family.cheapest for family in self.families if family.cheapest is not None]
        prices = [money(offer) for offer in offers]
        if not offers or None in prices:
            return None
        return min(offers, key=lambda offer: money(offer) or 0.0)

    def to_json(self) -> JsonObject:
        """The comparison as plain data; plans are named by their digests."""
        best = self.cheapest
        return {
            "model": self.model,
            "target": self.target.to_json(),
            "tokens_per_step": self.tokens_per_step,
            "families": [family.to_json() for family in self.families],
            "cheapest": None if best is None else best.topology,
        }

    def __str__(self) -> str:
        rows = [HEAD, *self.rows()]
        used = [
            column
            for column in range(len(HEAD))
            if column < 2 or any(row[column] for row in rows[1:])
        ]
        lines = [
            self.title,
            *aligned(
                [[row[column] for column in used] for row in rows], right=range(2, len(used) - 1)
            ),
        ]
        best = self.cheapest
        if best is not None and len(self.families) > 1:
            lines += wrapped("  - ", f"The least money: {best.topology}.")
        if self.target.prices and (unpriced := self._unpriced()):
            lines += wrapped("  - ", f"No price was given of {', '.join(unpriced)}.")
        for family in self.families:
            lines += wrapped("  - ", f"{family.family}: {family.certificate}.")
        return "\n".join(lines) + "\n"

    def _unpriced(self) -> list[str]:
        """Families that meet the deadline and have no price."""
        cheapest_by_family = [(family.family, family.cheapest) for family in self.families]
        return [
            name for name, best in cheapest_by_family if best is not None and money(best) is None
        ]

    @property
    def title(self) -> str:
        """The subject of the comparison."""
        return (
            f"{self.model}: {count_text(self.target.tokens)} tokens within {self.target.days:,.3g}"
            f" days, {count_text(self.tokens_per_step)} tokens per step"
        )

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Cells of the table, two rows a family, or one where one size is both."""
        for family in self.families:
            smallest, cheapest = family.smallest, family.cheapest
            if smallest is None or cheapest is None:
                yield (family.family, "none in time", *[""] * (len(HEAD) - 2))
                continue
            least = "fewest device-hours" if money(cheapest) is None else "cheapest"
            if smallest == cheapest:
                yield _row(smallest, f"smallest, {least}")
            else:
                yield _row(smallest, "smallest")
                yield _row(cheapest, least)

    def svg(self) -> str:
        """The comparison as a picture: days over devices, one line a family, with the deadline."""
        priced = [[o for o in family.tried if o.cost is not None] for family in self.families]
        devices = [math.log2(offer.devices) for offers in priced for offer in offers] or [0.0]
        days = [self.target.days, *(_days(offer) for offers in priced for offer in offers)]
        first = math.floor(min(devices))
        last = max(math.ceil(max(devices)), first + 1)
        low, high = math.log10(min(days)) - 0.1, math.log10(max(days)) + 0.1
        ticks = [
            f * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for f in (1, 2, 5)
        ]
        return render(
            "launch/comparison.svg",
            title=self.title,
            box=_BOX,
            x=LogAxis(
                low=2.0**first,
                high=2.0**last,
                start=_BOX.left,
                end=_BOX.right,
                marks=[(2.0**power, f"{2**power:,}") for power in range(first, last + 1)],
            ),
            y=LogAxis(
                low=10.0**low,
                high=10.0**high,
                start=_BOX.bottom,
                end=_BOX.top,
                marks=[
                    (value, f"{value:,.6g}") for value in ticks if low <= math.log10(value) <= high
                ],
            ),
            deadline=self.target.days,
            days=_days,
            device_hours=device_hours,
            families=[
                (offers, family.cheapest or offers[-1], _COLOURS[number % len(_COLOURS)])
                for number, (family, offers) in enumerate(zip(self.families, priced, strict=True))
                if offers
            ],
        )

    def html(self) -> str:
        """The comparison as one page without scripts or anything to fetch."""
        return render(
            "launch/comparison.html",
            title=self.title,
            picture=self.svg(),
            rows=self.rows(),
            head=HEAD,
            families=self.families,
        )

    def _repr_html_(self) -> str:
        return self.svg()


def money(offer: Offer) -> float | None:
    """Returns the price of an offer; None without a price."""
    return None if offer.cost is None else offer.cost.money


def _row(offer: Offer, what: str) -> tuple[str, ...]:
    assert offer.cost is not None and offer.plan is not None
    paid, energy = money(offer), offer.cost.kilowatt_hours
    idle = offer.devices - offer.plan.mesh.devices
    return (
        offer.topology,
        what,
        f"{offer.devices:,}",
        f"{offer.cost.wall_seconds / DAY:,.1f}",
        count_text(device_hours(offer)),
        "" if paid is None else f"{paid:,.0f}",
        "" if energy is None else f"{energy / 1000:,.0f}",
        percent_text(offer.mfu),
        f"{offer.plan.mesh}" + (f" ({idle:,} idle)" if idle else ""),
    )


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A model of some size on the machine.

    Attributes:
        config: the model.
        tokens: of its run.
        least_seconds: that its kernels alone take, spread equally over all devices.
        offer: the best plan and its cost; None where the kernels alone take too long.
    """

    config: TransformerConfig
    tokens: float
    least_seconds: float
    offer: Offer | None = None

    @property
    def meets(self) -> bool:
        """True if it is trained in time."""
        return self.offer is not None and self.offer.meets

    @property
    def why(self) -> str:
        """The time that it takes, or why it has no plan."""
        if self.offer is None:
            return f"kernels alone {days_text(self.least_seconds)}"
        if self.offer.cost is None:
            return self.offer.message
        return days_text(self.offer.cost.wall_seconds)

    def to_json(self) -> JsonObject:
        """The size as plain data."""
        config = self.config
        return {
            "parameters": config.parameter_count(),
            "layers": config.layers,
            "embed": config.embed,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "mlp": config.mlp,
            "tokens": self.tokens,
            "least_seconds": self.least_seconds,
            "offer": None if self.offer is None else self.offer.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The largest model of a family that a machine trains in time.

    Attributes:
        family: the known model whose shape it has.
        topology: the machine.
        deadline: seconds.
        best: the largest in time.
        looked: sizes that were planned, or excluded by their kernels, ascending.
        larger: names of all larger ones that the machine's peak alone does not exclude.
    """

    family: str
    topology: str
    deadline: float
    best: Sized
    looked: tuple[Sized, ...]
    larger: tuple[str, ...]

    @property
    def proven(self) -> bool:
        """True if every larger one was planned, or excluded by its kernels."""
        return not self._unseen

    @property
    def _unseen(self) -> list[str]:
        seen = {size.config.name for size in self.looked}
        return [name for name in self.larger if name not in seen]

    @property
    def certificate(self) -> str:
        """The parts that are proven, and those that were only tried."""
        above = [
            size
            for size in self.looked
            if size.config.parameter_count() > self.best.config.parameter_count()
        ]
        planned = [size for size in above if size.offer is not None]
        excluded = len(above) - len(planned)
        reasons = [f"{size.config.name} ({size.why})" for size in planned]
        words = (
            f"planned, and not in time: {', '.join(reasons)}"
            if reasons
            else "none above was planned"
        )
        if excluded:
            words += f"; of {excluded} larger ones the kernels alone take too long"
        if self.proven:
            return f"the largest of the family, proven: {words}"
        return (
            f"the largest that was found: {words}; {len(self._unseen)} larger ones were not looked"
            " at, as if a larger one took longer"
        )

    def to_json(self) -> JsonObject:
        """The result as plain data."""
        return {
            "family": self.family,
            "topology": self.topology,
            "deadline_seconds": self.deadline,
            "best": self.best.to_json(),
            "proven": self.proven,
            "certificate": self.certificate,
            "looked_at": [size.to_json() for size in self.looked],
        }

    def __str__(self) -> str:
        config, offer = self.best.config, self.best.offer
        assert offer is not None and offer.plan is not None and offer.cost is not None
        rows = [
            ["parameters", parameters_text(config.parameter_count())],
            [
                "shape",
                f"{config.layers} layers, width {config.embed:,}, {config.heads} heads,"
                f" {config.kv_heads} of keys, feed-forward {config.mlp:,}",
            ],
            ["tokens", f"{count_text(self.best.tokens)}, {self._per_parameter:,.3g} a parameter"],
            ["time", f"{days_text(offer.cost.wall_seconds)} of {days_text(self.deadline)}"],
            ["device-hours", count_text(offer.cost.device_hours)],
            ["mesh", f"{offer.plan.mesh}, MFU {percent_text(offer.mfu)}"],
        ]
        if offer.cost.money is not None:
            rows.insert(5, ["cost", f"{offer.cost.money:,.0f}"])
        lines = [f"The family of {self.family} on {self.topology}", *aligned(rows)]
        return "\n".join([*lines, *wrapped("  - ", f"It is {self.certificate}.")]) + "\n"

    @property
    def _per_parameter(self) -> float:
        return self.best.tokens / self.best.config.parameter_count()


#: A gap of the cheapest size, to the bound, at which no other is looked for.
ENOUGH = 0.01


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step that can be planned on any machine of a family.

    Attributes:
        tokens: of a step.
        planned: the best plan on a machine; `InfeasibleError` and `PinError` where there is none.
        least: seconds times devices that no plan of the step on a machine beats.
    """

    tokens: int
    planned: Callable[[Topology], Plan]
    least: Callable[[Topology], float]


def offers(family: str, sizes: Sequence[Topology], step: Step, target: Target) -> Offers:
    """Looks for the smallest and the cheapest size of a family that meet a deadline.

    All sizes that a bound does not exclude are planned, from the smallest to the first in time.
    From there on doublings are planned, until two in a row cost more than the best; then the
    neighbours of the best.
    """
    steps = target.tokens / step.tokens
    bounds = [step.least(machine) * steps for machine in sizes]
    lowest = min(bounds) / 3600
    tried: dict[int, Offer] = {}
    excluded: list[str] = []

    def look(index: int) -> Offer:
        if index not in tried:
            tried[index] = offer(sizes[index], step, target)
        return tried[index]

    first: int | None = None
    for index, machine in enumerate(sizes):
        if bounds[index] / machine.devices > target.deadline:
            excluded.append(machine.name)
        elif look(index).meets:
            first = index
            break
    if first is not None:
        _cheaper(first, sizes, look, lowest)
    done = {sizes[index].name for index in tried} | set(excluded)
    return Offers(
        family=family,
        tried=tuple(tried[index] for index in sorted(tried)),
        excluded=tuple(excluded),
        unseen=tuple(machine.name for machine in sizes if machine.name not in done),
        least_device_hours=lowest,
    )


def _cheaper(
    first: int, sizes: Sequence[Topology], look: Callable[[int], Offer], lowest: float
) -> None:
    """Plans larger machines than the smallest in time, as long as they may be cheaper."""
    best, worse = first, 0

    def price(index: int) -> float:
        candidate = look(index)
        return device_hours(candidate) if candidate.meets else math.inf

    def near() -> bool:
        return price(best) <= lowest * (1 + ENOUGH)

    for index in _doublings(first, sizes):
        if near() or worse == 2:
            break
        worse = worse + 1 if price(index) >= price(best) else 0
        best = min(best, index, key=price)
    for index in (best - 1, best + 1):
        if first < index < len(sizes) and not near():
            price(index)


def _doublings(first: int, sizes: Sequence[Topology]) -> list[int]:
    indices, devices = list[int](), sizes[first].devices
    for index in range(first + 1, len(sizes)):
        if sizes[index].devices >= 2 * devices:
            indices.append(index)
            devices = sizes[index].devices
    return indices


def offer(machine: Topology, step: Step, target: Target) -> Offer:
    """Returns the offer of a machine for the run."""
    empty = Offer(topology=machine.name, devices=machine.devices, deadline=target.deadline)
    try:
        plan = step.planned(machine)
    except (InfeasibleError, PinError) as error:
        return replace(empty, message=str(error).splitlines()[0])
    try:
        cost = run_cost(
            plan,
            machine,
            tokens=target.tokens,
            price=target.price(machine.chip.name, machine.chip.devices_per_chip),
            mtbf=target.mtbf(machine.devices),
            restart=target.restart,
        )
    except ArgumentError as error:  # the target is sound: failures let no run end
        return replace(empty, plan=plan, message=str(error).splitlines()[0])
    return replace(empty, plan=plan, cost=replace(cost, devices=machine.devices))


# --------------------------------------------------------------------------------------------------
# A comparison as one SVG file: days of the run over devices, both logarithmic, a line for each
# kind of machine, and the deadline.
#
# A filled circle is a size in time, a ring one that is not; the cheapest of each kind is named.
# Figures are tooltips. Nothing is fetched, and there are no scripts.

_BOX = Box(width=760, height=420, left=84, right=640, top=48, bottom=364)
_COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)


def _days(offer: Offer) -> float:
    assert offer.cost is not None
    return offer.cost.wall_seconds / DAY


#: Devices of the largest machines that are looked at, unless it is said.
LARGEST = 16_384


def compare(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    topologies: Sequence[str],
    target: Target,
    largest: int = LARGEST,
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Filter = None,
    rows: str = "prove",
) -> Comparison:
    """For each kind of machine the smallest and the cheapest size that ends a run in time.

    Args:
        loss: (model, batch) -> scalar or (scalar, metrics).
    """
    require_arguments("compare", loss=loss, optimizer=optimizer, pin=pin, name=name)
    spellings = [spelled(topology) for topology in topologies]
    if not spellings or len(set(spellings)) < len(spellings):
        raise ArgumentError(
            f"topologies is {list(topologies)!r}; it names kinds of machines, each once\nTry:"
            ' topologies=["h100:8", "v5p"]'
        )
    pins = Pins.parse(pin)
    if pins.exchange.islands > 1:
        raise PinError("an exchange of islands is pinned; sizes of one island are compared")
    sizes = {family: machines(family, largest) for family in spellings}
    _require_prices_of(target, [machine for many in sizes.values() for machine in many])
    traced = problem(
        init, loss, optimizer, batch, batch_axes=batch_axes, name=name, wrt=wrt, rows=rows
    )
    step = step_of(traced, pins)
    return Comparison(
        model=traced.model,
        target=target,
        tokens_per_step=traced.tokens,
        families=tuple(offers(family, sizes[family], step, target) for family in spellings),
    )


def _require_prices_of(target: Target, compared: Sequence[Topology]) -> None:
    """Raises where there is a price of a chip that no machine has."""
    chips = list(dict.fromkeys(machine.chip.name for machine in compared))
    if unused := [chip for chip in target.prices if chip not in chips]:
        raise ArgumentError(
            f"there is a price of {', '.join(unused)}, and the machines that are compared are of"
            f" {', '.join(chips)}\nTry: a price of these, or another machine"
        )


def step_of(traced: Problem, pins: Pins) -> Step:
    """A traced step that is planned on one machine after another, prepared once a vendor."""
    loads: dict[str, Workload] = {}

    def load(machine: Topology) -> Workload:
        vendor = machine.chip.vendor
        loads[vendor] = prepared_workload(traced, machine, loads.get(vendor), None, pins)
        return loads[vendor]

    def planned(machine: Topology) -> Plan:
        return search(traced, machine, pins, workload=load(machine))

    def least(machine: Topology) -> float:
        return least_device_seconds(load(machine), machine, pins)

    return Step(tokens=traced.tokens, planned=planned, least=least)


# --------------------------------------------------------------------------------------------------
# `fit_model`: the largest model that a machine trains in time.
#
# How many tokens a model is trained on follows from its size: J. Hoffmann et al., "Training
# compute-optimal large language models", arXiv:2203.15556, find by three ways that parameters and
# tokens should grow alike, at about 20 tokens a parameter; T. Besiroglu et al., "Chinchilla
# scaling: a replication attempt", arXiv:2404.10102, find the same from the corrected third. Models
# that are to be cheap to serve are trained on more: Llama 3 405B on 15.6T tokens, 38 a parameter
# (arXiv:2407.21783). So the number is an argument.

#: Tokens a parameter with the least loss for its FLOPs, see above.
TOKENS_PER_PARAMETER = 20.0
#: Part of the peak at which the search for the largest model begins, and the smallest that is
#: looked at: parts of the parameters that the peak alone would allow.
FIRST_GUESS, SMALLEST = 0.65, 1e-3
#: Sizes above the largest in time that are planned, too.
BEYOND = 4


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a model.

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
    limit = _parameter_limit(base, machine, budget, exact=pin is None)
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


def _parameter_limit(base: object, machine: Topology, budget: Budget, *, exact: bool) -> float:
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
        """Returns whether a size is trained in time."""
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


def least_device_seconds(workload: Workload, topology: Topology, pins: Pins) -> float:
    """Lower bound on (step time x devices) for any plan on the machine.

    It is the kernel time of the unsharded step under the cheapest remat policy, attention kernel
    and dtypes that may be chosen; communication, waiting and launches are not included.
    """
    return min(
        UnshardedBounds(workload=variant, space=space, pricer=pricer).seconds
        for variant, space in spaces(workload, topology.chip, pins)
        for pricer in [Pricer(topology, variant.profile)]
    )
