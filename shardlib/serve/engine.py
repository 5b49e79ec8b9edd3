"""Engines: requests in, tokens out, of one model or of several.

>>> engine = Engine(init, forward, capacity=Capacity(longest=256))      # doctest: +SKIP
>>> engine.generate([[5, 2, 7]], most=4)                              # doctest: +SKIP
[[11, 3, 11, 8]]

`Models` are several models at once in one process, each with pages of its own.

>>> models = Models({"small": small, "large": large})                     # doctest: +SKIP
>>> models.add("small", GenerationRequest(prompt=(5, 2, 7)))              # doctest: +SKIP
>>> models.run()                                                          # doctest: +SKIP

A name is a key, and nothing else. The models share the device: the next step is of the model that
has had the least time of it over its share, among those that have something to do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import numpy as np

from shardlib.annotation.model import Init
from shardlib.annotation.trees import Tree
from shardlib.errors import ArgumentError, raise_all
from shardlib.serve.computing import (
    Adapters,
    DraftModel,
    Drafts,
    Encode,
    Ngrams,
    Sources,
    built,
    draft_model,
    shapes,
)
from shardlib.serve.program import Forward, TracedForward
from shardlib.serve.requests import (
    LATE,
    LENGTH,
    Capacity,
    Event,
    GenerationRequest,
    Request,
    SampledToken,
    Sampling,
    wrong_shares,
)
from shardlib.serve.sampling import (
    Guided,
    Guides,
)
from shardlib.serve.scheduling import Groups, Schedule, ScheduledChunk
from shardlib.serve.step import Step
from shardlib.untrusted.data import is_integer

#: Seconds that masks of forms are waited for where nothing else is to be done; and otherwise, as a
#: share of the last step.
IDLE_SECONDS, PATIENCE = 0.05, 0.1


class Engine:
    """Serves a model: any number of requests, some of them at a time.

    Args:
        init: what makes the model, as `shardlib.compile` takes it.
        forward: (model, int32 tokens [batch, seq]) -> logits [batch, seq, vocab]; attention by
            `shardlib.attention`, or of one token with a cache of the model's own
            (`computing.py`).
        weights: params, such as `state.params` of a training state; (params, state) where the model
            has state; or a seed that draws them.
        capacity: how many requests and tokens are served.
        tensor: devices that share every layer.
        data: groups of so many devices, each with requests and pages of its own, as many as the
            capacity says.
        devices: to choose from, of this process; all of them by default.
        check: whether results are compared with the forward pass itself.

    Raises:
        ArgumentError: sizes that are not usable, or do not fit each other.
        ModelError: the model cannot be served with a cache, or gives other logits with one.

    Attributes:
        schedule: requests that wait, and those that have a slot.
    """

    def add_several(self, generation: GenerationRequest, count: int) -> list[Request]:
        """Several answers to one prompt wait to be served. The pages that the prompt fills are
        computed once, and shared.
        """
        if not is_integer(count) or count < 1:
            raise ArgumentError(f"{count!r} answers are asked for; a prompt has at least one")
        return [self.add(request) for request in generation.answers(count)]

    def run(self) -> None:
        """Serves until every request has ended."""
        while self.schedule.waiting or self.schedule.running:
            self.step()

    def generate(
        self, prompts: Sequence[Sequence[int]], most: int = 16, *, sampling: Sampling | None = None
    ) -> list[list[int]]:
        """The answers to some prompts.

        Args:
            sampling: how each is chosen; by default the likeliest.
        """
        options = sampling or Sampling()
        requests = [
            self.add(GenerationRequest(prompt=_tokens(prompt), most=most, sampling=options))
            for prompt in prompts
        ]
        self.run()
        return [request.answer for request in requests]

    def stream(
        self, prompt: Sequence[int], most: int = 16, *, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """The tokens of one answer, as they come; others are served beside it.

        Args:
            sampling: how each is chosen; by default the likeliest.
        """
        options = sampling or Sampling()
        request = self.add(GenerationRequest(prompt=_tokens(prompt), most=most, sampling=options))
        try:
            while request.ended is None:
                for event in self.step():
                    if event.request is request and event.token is not None:
                        yield event.token
        finally:
            request.cancelled = True

    def __init__(
        self,
        init: Init,
        forward: Forward,
        *,
        weights: Tree | int = 0,
        capacity: Capacity | None = None,
        tensor: int = 1,
        data: int = 1,
        devices: Sequence[jax.Device] | None = None,
        check: bool = True,
    ) -> None:
        parts = built(
            init,
            forward,
            weights=weights,
            capacity=capacity or Capacity(),
            grid=(data, tensor),
            devices=jax.local_devices() if devices is None else list(devices),
            check=check,
        )
        self.capacity, self.forward, self.compute = parts.capacity, parts.forward, parts.compute
        self._placed = parts.place
        self._fresh: tuple[Tree, Tree] | None = None
        self.schedule = (
            Schedule(self.capacity, chunk=parts.chunk)
            if data == 1
            else Groups(data, self.capacity, chunk=parts.chunk)
        )
        self._drafts: Drafts = Ngrams()
        self._guided, self._patience = Guided(), 0.0
        self._sources: Sources | None = None
        self._adapters, self._base = Adapters(self.capacity.adapters), self.compute.weights
        self.steps = 0
        self.clock = time.monotonic
        self._due: dict[Request, float] = {}
        self._numbers = itertools.count()

    def spell(self, tokens: Sequence[bytes], ends: Collection[int]) -> None:
        """Says what tokens spell, so that answers may have a form (`GenerationRequest(form=)`).

        Args:
            tokens: bytes of each; empty for those that spell none.
        """
        self._guided.guides = Guides(tokens, ends, vocab=self.forward.vocab)

    def adapt(self, name: str, params: Tree) -> None:
        """Adds an adapter that requests name (`GenerationRequest(adapter=)`), or replaces one that
        no request uses. Programs are compiled anew with the first.
        """
        others = [*self.schedule.running, *self.schedule.waiting]
        if any(request.asked.adapter == name for request in others):
            raise ArgumentError(f"requests use the adapter {name!r}")
        if not isinstance(self.compute, Step) or self._sources is not None:
            raise ArgumentError(
                "a model with a cache of its own, or with an encoder, has no adapters"
            )
        replaces = name in self._adapters.rows
        self._adapters.add(name, params, self._base)
        rows = self._adapters.rows
        self.compute.adapt(
            self._adapters.wrapped(self._base),
            lambda share: rows.get(share.request.asked.adapter, 0),
        )
        if replaces:  # pages of the one that had the name
            self.schedule.pool.forget()

    def encode_with(self, encode: Encode, *, longest: int) -> None:
        """Adds an encoder, whose results the forward pass looks at: each request has a source
        (`GenerationRequest(source=)`), which is encoded once, when the request gets a slot.

        Args:
            encode: (model, int32 source [1, longest], how many of its tokens count) -> arrays by
                dotted path, in place of variables of the model with a row, [1, ...].
        """
        if not is_integer(longest) or longest < 1:
            raise ArgumentError(f"longest is {longest!r}; a source has at least one token")
        if not isinstance(self.compute, Step) or self._adapters.rows:
            raise ArgumentError("a model with adapters, or a cache of its own, has no encoder")
        if self.schedule.running or self.schedule.waiting:
            raise ArgumentError("requests wait that have no source")
        assert isinstance(self.forward, TracedForward)
        self._sources = Sources(
            self.forward.model, encode, longest, self._base, len(self.schedule.slots)
        )
        self.compute.adapt(self._sources.wrapped(self._base), lambda share: share.slot + 1)

    def draft_with(self, init: Init, forward: Forward, *, weights: Tree | int = 0) -> None:
        """Guesses `Capacity.drafts` tokens ahead with a smaller model, in place of what followed
        the last time. It has as many pages; what is served is not changed by what it guesses.
        """
        if self.schedule.running:
            raise ArgumentError("the model cannot guess: requests have a slot")
        self._drafts = draft_model(init, forward, weights, beside=self.compute, sizes=self.capacity)

    @property
    def guides(self) -> Guides | None:
        """Of answers that have a form; None before `spell`."""
        return self._guided.guides

    @property
    def room(self) -> int:
        """Tokens of a request at most, prompt and answer together."""
        return self.capacity.room

    @property
    def replacing(self) -> bool:
        """True if other weights wait for the requests that have begun."""
        return self._fresh is not None

    def replace(self, weights: Tree | int) -> None:
        """Serves with other weights as soon as all requests that have begun have ended; the others
        wait for that, so that every answer is of one model. Pages of the old weights are not used
        again.
        """
        fresh = self._placed(weights)
        if shapes(fresh) != shapes(self._base):
            raise ArgumentError(
                "the weights are those of another model: their shapes or dtypes differ"
            )
        self._fresh, self.schedule.closed = fresh, True

    def add(self, generation: GenerationRequest) -> Request:
        """A request waits to be served."""
        failures = generation.failures(vocab=self.forward.vocab, room=self.room)
        failures += self._adapters.failures(generation)
        if self._sources is not None:
            failures += self._sources.failures(generation)
        elif generation.source:
            failures.append("it has a source, and the model has no encoder")
        if failures:
            raise_all(ArgumentError, "the request cannot be served", failures)
        request = self._guided.request(next(self._numbers), generation)
        self.schedule.add(request)
        if generation.seconds is not None:
            self._due[request] = self.clock() + generation.seconds
        return request

    def step(self) -> list[Event]:
        """Computes one step; returns what is new, nothing where there is nothing to do."""
        if self._fresh is not None and not self.schedule.begun:
            self._base, self._fresh = self._fresh, None
            self.compute.weights = self._adapters.wrapped(self._base)
            if self._sources is not None:
                self._sources.forget()
            self.schedule.pool.forget()
            self.schedule.closed = False
        before = [*self.schedule.running, *self.schedule.waiting]
        self._end_late()
        alone = all(request.late for request in before)
        for request, why in self._guided.settled(IDLE_SECONDS if alone else self._patience):
            self.schedule.end(request, why)
        guesses = (
            self._drafts.guessed(self.schedule.running, self.capacity.drafts)
            if self.capacity.drafts
            else {}
        )
        shares = self.schedule.next(guesses)
        events = [
            Event(request=request, token=None) for request in before if request.ended is not None
        ]
        if not shares:
            return events
        if self.capacity.drafts:
            shares = self._drafts.filled(shares)
        if self._sources is not None:
            self.compute.weights = self._sources.wrapped(self._base, shares)
        masks, began = self._guided.masks(shares), time.monotonic()
        sampled = self.compute(shares, masks)
        self.steps += 1
        self._patience = PATIENCE * (time.monotonic() - began)
        accepted = {
            share.request.number: self._take(share, tokens, events)
            for share, tokens in zip(shares, sampled, strict=True)
        }
        self._guided.ask()
        self.schedule.done(shares, accepted)
        self._drafts.done(shares, accepted)
        for share in shares:
            if share.request.ended is not None:
                self.schedule.release(share.request)
        return events

    def _end_late(self) -> None:
        self._due = {request: due for request, due in self._due.items() if request.ended is None}
        if self._due:
            now = self.clock()
            for request in [request for request, due in self._due.items() if due <= now]:
                self.schedule.end(request, LATE)

    def _take(
        self, share: ScheduledChunk, sampled: Sequence[SampledToken], events: list[Event]
    ) -> int:
        """A request takes what its rows tell; returns how many of the drafted tokens are kept."""
        request, accepted = share.request, 0
        if not share.ends:
            request.scores += sampled
            return 0
        scored = len(sampled) - 1 - len(share.drafted)
        request.scores += sampled[:scored]
        if not request.asked.most:
            request.ended = LENGTH
            events.append(Event(request=request, token=None))
            return 0
        for token, guess in zip(sampled[scored:], (*share.drafted, None), strict=True):
            request.took(token.token, token.logprob, token.likeliest)
            follows = self._guided.took(request, token.token)
            new = None if token.token in request.asked.stop else token.token
            events.append(Event(request=request, token=new))
            if request.ended is not None or not follows or token.token != guess:
                break
            accepted += 1
        return accepted

    def warm_up(self) -> None:
        """Compiles all programs, so that nothing is compiled while requests wait."""
        self.compute.warm_up()
        if isinstance(self._drafts, DraftModel):
            self._drafts.step.warm_up()


def _tokens(prompt: Sequence[int]) -> tuple[int, ...]:
    """Of a list or an array of NumPy."""
    return tuple(prompt.tolist() if isinstance(prompt, np.ndarray) else prompt)


class Models(Mapping[str, Engine]):
    """Engines by name.

    Args:
        engines: each with its own capacity.
        shares: of them in the time of the device, above 0; 1 of those that have none.

    Raises:
        ArgumentError: no engines, two names of one engine, or shares that are not usable.
    """

    def __init__(
        self, engines: Mapping[str, Engine], *, shares: Mapping[str, float] | None = None
    ) -> None:
        self._engines = dict(engines)
        self._shares = dict(shares or {})
        failures = [] if engines else ["there is none"]
        failures += [
            f"the share of {name!r} is of no model" for name in self._shares if name not in engines
        ]
        failures += wrong_shares(self._shares)
        if len({id(engine) for engine in engines.values()}) < len(engines):
            failures.append("one engine has two names")
        if failures:
            raise_all(ArgumentError, "the models cannot be served", failures)
        self._spent = dict.fromkeys(engines, 0.0)
        self._idle = set(engines)
        self.clock = time.perf_counter

    def __getitem__(self, name: str) -> Engine:
        return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def add(self, name: str, generation: GenerationRequest) -> Request:
        """A request waits to be served by a model."""
        if name not in self._engines:
            raise ArgumentError(
                f"there is no model {name!r}; there are {', '.join(map(repr, self._engines))}"
            )
        return self[name].add(generation)

    def step(self) -> list[Event]:
        """Computes a step of one model, where there is something to do; returns what is new."""
        busy = [
            name
            for name, engine in self._engines.items()
            if engine.schedule.waiting or engine.schedule.running
        ]
        if not busy:
            self._idle = set(self._engines)
            return []
        active = [self._used(name) for name in busy if name not in self._idle]
        for name in busy:  # one that had nothing to do has saved nothing up
            if name in self._idle and active:
                minimum = min(active) * self._shares.get(name, 1.0)
                self._spent[name] = max(self._spent[name], minimum)
        self._idle = set(self._engines) - set(busy)
        name = min(busy, key=self._used)
        start = self.clock()
        events = self[name].step()
        self._spent[name] += self.clock() - start
        return events

    def run(self) -> None:
        """Serves until every request has ended."""
        while any(engine.schedule.waiting or engine.schedule.running for engine in self.values()):
            self.step()

    def warm_up(self) -> None:
        """Compiles all programs of all models."""
        for engine in self.values():
            engine.warm_up()

    def _used(self, name: str) -> float:
        return self._spent[name] / self._shares.get(name, 1.0)
