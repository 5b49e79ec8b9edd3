"""What the clients of a federation train: everything but their rows is alike."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import numpy as np
import optax

from shardlib.annotation.read import Init
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.annotation.trees.wrt import Filter
from shardlib.decisions.pins import PinMapping
from shardlib.errors import ArgumentError, raise_all
from shardlib.frontend.traced_model import Loss
from shardlib.hardware.topology import Topology
from shardlib.untrusted.arguments import read_seed
from shardlib.untrusted.shown import shown

if TYPE_CHECKING:
    from shardlib.lowering.program.program import Program
    from shardlib.lowering.runtime.state import TrainState

#: (partition, partitions) -> all rows of a client: a tree like the batch, of any number of rows.
Rows = Callable[[int, int], Tree]
#: What a client plans for, see `shardlib.compile`.
Place = str | Topology | None
#: Words of `Local`.
KEEP, WEIGHT = ("nothing", "optimizer"), ("rows", "equal")


@dataclass(frozen=True, kw_only=True, eq=False)
class Local:
    """How a client trains in a round.

    Attributes:
        epochs: passes over the client's rows. A round has as many whole batches as so many passes
            give, and at least one.
        keep: "nothing": the optimizer begins anew in each round, so that what a client sends
            depends on the parameters and its rows alone; or "optimizer": its state is kept between
            the rounds of a client, in Flower's context of the client.
        weight: "rows": a client counts as many times as it has rows; or "equal": all count alike,
            as bounds of differential privacy ask for.
        seed: of the parameters, of the order of rows and of random streams.
        start: program -> the state whose frozen parameters a client uses; by default
            `program.init(seed)`. It is called once by each program, which donates what it gives.
        evaluation: loss of evaluations, see `shardlib.compile`.

    Raises:
        ArgumentError: values that are none of these; all of them are listed.
    """

    epochs: int = 1
    keep: str = "nothing"
    weight: str = "rows"
    seed: int = 0
    start: Callable[[Program], TrainState] | None = None
    evaluation: Loss | None = None

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {shown(value)}; it is one of {', '.join(map(repr, words))}"
            for name, value, words in (
                ("keep", self.keep, KEEP),
                ("weight", self.weight, WEIGHT),
            )
            if value not in words
        ]
        if type(self.epochs) is not int or self.epochs < 1:
            failures.append(f"epochs is {shown(self.epochs)}; it is an integer of at least 1")
        if failures:
            raise_all(ArgumentError, "federated.Local is not usable", failures)
        read_seed(self.seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What clients train. Two jobs are equal where one is a copy of the other in another process.

    Attributes:
        init: see `shardlib.compile`.
        loss: see `shardlib.compile`; that of the rows of one client.
        optimizer: of local steps, an optax transformation.
        batch: of a local step: arrays or `jax.ShapeDtypeStruct` whose first dims are rows.
        rows: (partition, partitions) -> all rows of a client; called in every round.
        validation: the same for evaluations; by default `rows`.
        topology: of one client, or a function of its partition; by default all devices that its
            process sees.
        pin: decisions of a client's plan, fixed by hand.
        batch_axes: logical axes of the batch; by default the convention.
        wrt: what is trained; all parameters if left out. The rest is frozen, and never sent.
        local: how a client trains in a round.
        token: of this job, by which a process knows it again.

    Raises:
        ArgumentError: arrays of the batch do not have the same number of rows.
    """

    init: Init
    loss: Loss
    optimizer: optax.GradientTransformation
    batch: Tree
    rows: Rows
    validation: Rows | None = None
    topology: Place | Callable[[int], Place] = None
    pin: PinMapping | None = None
    batch_axes: Tree = None
    wrt: Filter = None
    local: Local = field(default_factory=Local)
    token: str = field(init=False, repr=False, default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        sizes = {
            path_text(path) or "batch": np.shape(leaf)[:1]
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch)
        }
        if len(set(sizes.values())) != 1 or () in sizes.values() or (0,) in sizes.values():
            raise_all(
                ArgumentError,
                "arrays of a batch have the same number of rows, at least one, as their first dim",
                [f"{path} has {list(size)}" for path, size in sizes.items()] or ["it is empty"],
                hint='batch={"x": jax.ShapeDtypeStruct((rows, width), "float32")}',
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    @property
    def size(self) -> int:
        """Rows of a local step."""
        return np.shape(jax.tree.leaves(self.batch)[0])[0]

    def place(self, partition: int) -> Place:
        """What the client of a partition plans for."""
        return self.topology(partition) if callable(self.topology) else self.topology
