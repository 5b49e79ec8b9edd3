"""An island that is a process of its own: its planned, sharded program, and its meetings."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from shardlib.annotation.model import UserModule
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import LaunchError, StateError
from shardlib.exchanges.diloco import DiLoCo
from shardlib.exchanges.parts import Part
from shardlib.jax_types import Metrics
from shardlib.lowering.islands.halves import name_of, with_trained
from shardlib.lowering.islands.start import streams_of
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.processes.ranks import is_first
from shardlib.processes.values import whole
from shardlib.report import Finding
from shardlib.servers.islands.coming import in_use_order
from shardlib.servers.islands.exchanging import Exchanging
from shardlib.servers.islands.met import Crossed, Met
from shardlib.servers.islands.on_device import copies, mixed, placed_outer, runs


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossing:
    """What an island has sent and has not taken in.

    Attributes:
        due: the step after which it is taken in.
        parts: runs of parameters that it is about.
        met: the meeting, once it is done.
    """

    due: int
    parts: tuple[Part, ...]
    met: Crossed


@dataclass(kw_only=True, eq=False)
class Island:
    """One of the islands of a run; the others are processes elsewhere.

    Attributes:
        program: of this island.
        exchanging: its way to the outer server.
        findings: what it has to say.
        say: is told what happens.
        steps: of the run, so far: where this island has come late, it begins where the others are.
        meetings: of this island, in order.
        events: what has happened and somebody should know.
    """

    program: Program
    exchanging: Exchanging
    findings: tuple[Finding, ...] = ()
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    steps: int = 0
    meetings: list[Met] = field(default_factory=list[Met])
    events: list[str] = field(default_factory=list[str])
    _crossing: Crossing | None = None

    @property
    def number(self) -> int:
        """Of this island, from 0 on."""
        return self.exchanging.number

    @property
    def exchange(self) -> DiLoCo:
        """How the islands meet."""
        return self.exchanging.exchange

    @property
    def round(self) -> int:
        """The round that comes next, from 1 on."""
        return self.exchanging.round

    def start(self, seed: int = 0) -> TrainState:
        """Waits for the others, and makes the state before the first step: parameters are the outer
        ones, random streams of the model are others on each island.
        """
        return self.begin(streams_of(self.number, self.program.init(seed)))

    def begin(self, state: TrainState) -> TrainState:
        """Waits for the others, and goes on from a state, such as one of a checkpoint: its
        parameters become the outer ones, the rest stays.
        """
        self.exchanging.enter(lambda: self._on_host(state))
        self.steps = (self.round - 1) * self.exchange.between
        return self.outer(state)

    def step(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        """Does one step of this island, and sends and takes in what is due after it."""
        if not self.round:
            raise StateError("the island has not started\nTry: state = island.start(seed=0)")
        state, metrics = self.program.step(state, batch)
        self.steps += 1
        if self._crossing is not None and self.steps >= self._crossing.due:
            state, on_time = self._taken(state)
            if not on_time:
                return state, metrics
        if self.exchange.due(self.steps) is not None:
            self._crossing = self._sent(state)
            if not self.exchange.delay:
                state, _ = self._taken(state)
        return state, metrics

    def finish(self, state: TrainState) -> TrainState:
        """Takes in what is still crossing, and leaves: the others go on without this island."""
        if self._crossing is not None:
            state, _ = self._taken(state, again=False)
        try:
            self.exchanging.leave()
        except LaunchError as error:  # the state is worth more
            self._note(f"island {self.number} cannot say that it leaves: {error}")
        return state

    def outer(self, state: TrainState) -> TrainState:
        """The state with the outer parameters, those of the last meeting; see `Program.evaluate`."""
        if self._crossing is not None:
            self._crossing.met.result()
        outer = self.exchanging.outline.arrays(self.exchanging.outer.theta)
        copied = {path: np.array(array) for path, array in outer.items()}
        return replace(state, params=with_trained(self.program, state.params, copied))

    def module(self, state: TrainState) -> UserModule:
        """The user's own model with the outer parameters."""
        return self.program.module(self.outer(state))

    def __enter__(self) -> Island:
        return self

    def __exit__(self, *raised: object) -> None:
        self.exchanging.close()

    def _sent(self, state: TrainState) -> Crossing:
        """Sends the fragment of the next round, once the devices have it."""
        exchanging = self.exchanging
        parts = exchanging.outline.parts(exchanging.fragment, self.exchange.fragments)
        leaves = self._leaves(state)
        arrays = copies([leaves[part.path] for part in parts])
        return Crossing(
            due=self.steps + self.exchange.delay,
            parts=parts,
            met=exchanging.send(lambda: runs(arrays, parts)),
        )

    def _taken(self, state: TrainState, *, again: bool = True) -> tuple[TrainState, bool]:
        """The state with what has crossed, and whether this island was in time; where it was not,
        it begins the next round with the others.
        """
        assert self._crossing is not None
        began, crossing = time.monotonic(), self._crossing
        placed = self._placed(crossing, self._leaves(state))
        met, self._crossing = crossing.met.result(), None
        if met is None:
            self._note(f"round {self.round} was closed without island {self.number}")
            if again:
                state = self.begin(state)
                self._note(f"island {self.number} begins round {self.round}")
            return state, False
        self.meetings.append(replace(met, waited_s=time.monotonic() - began))
        mixing = self.exchange.mixing if self.exchange.delay and met.finite else 0.0
        outer = self.exchanging.outline.arrays(self.exchanging.outer.theta)
        leaves = self._leaves(state)
        for part in crossing.parts:
            parameter, there = leaves[part.path], placed.get(part.path)
            there = placed_outer(parameter, outer[part.path]) if there is None else there
            leaves[part.path] = mixed(parameter, there, part, mixing)
        return self._with(state, leaves), True

    def _placed(self, crossing: Crossing, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Outer parameters, each placed as soon as it has come, those that are used first in front;
        not all of them where the meeting ends otherwise.
        """
        placed, exchanging = dict[str, jax.Array](), self.exchanging
        before = exchanging.outline.arrays(exchanging.outer.theta)
        for part in in_use_order(exchanging.uses, {part.path: part for part in crossing.parts}):
            run = crossing.met.run(part)
            if run is None:
                break
            array = before[part.path]
            if run.size == array.size:
                array = run.reshape(array.shape)
            else:
                array = np.array(array)
                array.reshape(-1)[part.start : part.stop] = run
            placed[part.path] = placed_outer(leaves[part.path], array)
        return placed

    def _leaves(self, state: TrainState) -> dict[str, jax.Array]:
        trained = self.program.model.partition.trained(state.params)
        leaves = jax.tree_util.tree_leaves_with_path(trained)
        return {name_of(path): leaf for path, leaf in leaves}

    def _with(self, state: TrainState, leaves: Mapping[str, jax.Array]) -> TrainState:
        partition = self.program.model.partition
        structure = jax.tree.structure(partition.trained(state.params))
        params = partition.joined(
            jax.tree.unflatten(structure, list(leaves.values())), state.params
        )
        return replace(state, params=params)

    def _on_host(self, state: TrainState) -> dict[str, np.ndarray]:
        return {path: whole(leaf).astype(np.float32) for path, leaf in self._leaves(state).items()}

    def _note(self, text: str) -> None:
        self.events.append(text)
        if is_first():
            self.say(text)
