"""The next token of each row, from logits: penalties and biases, sampling, and guides of forms."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import connection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.trees import Tree
from shardlib.errors import ArgumentError, MissingPackageError
from shardlib.serve.requests import (
    BROKEN,
    LENGTH,
    MOST_BIASED,
    MOST_LISTED,
    STOP,
    Form,
    GenerationRequest,
    Request,
    SampledToken,
)
from shardlib.serve.scheduling import ScheduledChunk
from shardlib.untrusted.confined import ChildLimits, Confined, Fork, RefusedError
from shardlib.untrusted.data import JsonMapping

# --------------------------------------------------------------------------------------------------
# Logits are changed before a choice: bias, penalties, tokens that are left out.
#
# In the order of vLLM: the bias is added, what has been said is penalised, and then tokens are
# left out. The repetition penalty (Keskar et al., arXiv:1909.05858, as `transformers` has it)
# counts prompt and answer; the frequency and presence penalties, as OpenAI defines them, the
# answer.

#: Bits of a word of a mask.
BITS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Edits:
    """Changes of the logits of each row, arrays [R, ...].

    Attributes:
        any: whether a row has any, a boolean scalar.
        frequency, presence, repetition: float32 [R].
        said: int32 [R, L], tokens before; those past the last are as large as the vocabulary.
        prompt: int32 [R], how many of them are the prompt's.
        biased: int32 [R, B], tokens with a bias, padded likewise.
        bias: float32 [R, B].
        allowed: uint32 [R, W], a bit for each token that may be chosen.
    """

    any: jax.Array | np.ndarray
    frequency: jax.Array | np.ndarray
    presence: jax.Array | np.ndarray
    repetition: jax.Array | np.ndarray
    said: jax.Array | np.ndarray
    prompt: jax.Array | np.ndarray
    biased: jax.Array | np.ndarray
    bias: jax.Array | np.ndarray
    allowed: jax.Array | np.ndarray


def edits(
    rows: Sequence[tuple[GenerationRequest, Sequence[int], int] | None],
    *,
    vocab: int,
    longest: int,
    allowed: Mapping[int, np.ndarray],
) -> Edits:
    """The changes that rows ask for."""
    count = len(rows)
    changes = Edits(
        any=np.zeros((), bool),
        frequency=np.zeros(count, np.float32),
        presence=np.zeros(count, np.float32),
        repetition=np.ones(count, np.float32),
        said=np.full((count, longest), vocab, np.int32),
        prompt=np.zeros(count, np.int32),
        biased=np.full((count, min(MOST_BIASED, vocab)), vocab, np.int32),
        bias=np.zeros((count, min(MOST_BIASED, vocab)), np.float32),
        allowed=np.full((count, -(-vocab // BITS)), 0xFFFFFFFF, np.uint32),
    )
    changed = False
    for index, row in enumerate(rows):
        if row is None:
            continue
        request, tokens, answered = row
        sampling, mask = request.sampling, allowed.get(index)
        if sampling.penalises:
            changed = True
            changes.frequency[index], changes.presence[index] = (
                sampling.frequency,
                sampling.presence,
            )
            changes.repetition[index] = sampling.repetition
            changes.said[index, : len(tokens)] = tokens
            changes.prompt[index] = len(tokens) - answered
        if sampling.bias:
            changed = True
            changes.biased[index, : len(sampling.bias)] = list(sampling.bias)
            changes.bias[index, : len(sampling.bias)] = list(sampling.bias.values())
        barred = {*sampling.barred, *(request.stop if answered < request.least else ())}
        if mask is not None:
            changed = True
            changes.allowed[index] = mask
        if barred:
            changed = True
            out = np.zeros(changes.allowed.shape[1] * BITS, bool)
            out[list(barred)] = True
            changes.allowed[index] &= ~bits(out)
    return Edits(**{**vars(changes), "any": np.asarray(changed)})


def bits(which: np.ndarray) -> np.ndarray:
    """Booleans as bits, the first in the lowest of the first word.

    Args:
        which: bool [W times 32].
    """
    return np.packbits(which, bitorder="little").view("<u4").astype(np.uint32)


def edited(logits: jax.Array, edits: Edits) -> jax.Array:
    """Logits after the changes, float32 [R, vocab]; tokens that are left out have minus infinity.

    Args:
        logits: float32 [R, vocab].
    """
    return jax.lax.cond(jnp.asarray(edits.any), _edited, lambda logits, _: logits, logits, edits)


def _edited(logits: jax.Array, edits: Edits) -> jax.Array:
    rows, vocab = logits.shape
    row = jnp.arange(rows)[:, None]
    logits = logits.at[row, edits.biased].add(edits.bias, mode="drop")
    tokens = jnp.asarray(edits.said)
    answer = jnp.arange(tokens.shape[1])[None] >= jnp.asarray(edits.prompt)[:, None]
    nothing = jnp.zeros((rows, vocab), jnp.float32)
    seen = nothing.at[row, tokens].add(1.0, mode="drop") > 0
    counts = nothing.at[row, tokens].add(answer.astype(jnp.float32), mode="drop")
    repetition = jnp.asarray(edits.repetition)[:, None]
    weaker = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, weaker, logits)
    logits -= counts * jnp.asarray(edits.frequency)[:, None]
    logits -= (counts > 0) * jnp.asarray(edits.presence)[:, None]
    token = jnp.arange(vocab)
    words = jnp.asarray(edits.allowed)[:, token // BITS]
    allowed = (words >> (token % BITS).astype(jnp.uint32)[None]) & 1
    return jnp.where(allowed == 1, logits, -jnp.inf)


#: An operand: an array of the host, or of a device.
Array = jax.Array | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Row:
    """A token of a step whose logits are wanted.

    Attributes:
        request: whose.
        drafted: tokens that stand between its own and the one that is chosen.
        given: the token that follows, where it is known and only its probability is asked; -1
            where it is chosen.
    """

    request: Request
    drafted: tuple[int, ...] = ()
    given: int = -1

    @property
    def tokens(self) -> list[int]:
        """Those before the one that is chosen."""
        return [*self.request.tokens, *self.drafted]

    @property
    def answered(self) -> int:
        """Tokens of the answer before it."""
        return len(self.request.answer) + len(self.drafted)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Choices:
    """Sampling options of each row, arrays [R]; see `Sampling`.

    Attributes:
        temperature, top_p, min_p: float32.
        top_k, position: int32.
        seed: uint32.
        given: int32, see `Row`.
        listed: bool, whether the likeliest tokens are asked for.
        edits: changes to the logits before.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    position: Array
    given: Array
    listed: Array
    edits: Edits


def choices(
    rows: Sequence[Row | None],
    *,
    vocab: int,
    longest: int,
    allowed: Mapping[int, np.ndarray] | None = None,
) -> Choices:
    """The choices of rows; those that are None take the likeliest token."""

    def array(dtype: str, default: float, of: Callable[[Row], float]) -> np.ndarray:
        return np.asarray([default if row is None else of(row) for row in rows], dtype)

    def setting(name: str, dtype: str, default: float) -> np.ndarray:
        return array(dtype, default, lambda row: getattr(row.request.asked.sampling, name))

    return Choices(
        temperature=setting("temperature", "float32", 0.0),
        top_k=setting("top_k", "int32", 0),
        top_p=setting("top_p", "float32", 1.0),
        min_p=setting("min_p", "float32", 0.0),
        seed=setting("seed", "uint32", 0),
        position=array("int32", 0, lambda row: row.request.count + len(row.drafted)),
        given=array("int32", -1, lambda row: row.given),
        listed=array("bool", 0, lambda row: row.request.asked.top > 0),
        edits=edits(
            [
                None if row is None else (row.request.asked, row.tokens, row.answered)
                for row in rows
            ],
            vocab=vocab,
            longest=longest,
            allowed=allowed or {},
        ),
    )


# --------------------------------------------------------------------------------------------------
# The choice of the next token of each row, and logarithms of probabilities.
#
# Each choice has random numbers of its own, of the seed of its request and of the position, so
# that what else is served changes nothing. They belong to tokens (the Gumbel-max trick): two
# models that agree nearly, such as one and its draft, choose the same token nearly always under
# one seed.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The tokens chosen in each row.

    Attributes:
        token: int32 [R].
        logprob: float32 [R], the natural logarithm of its probability under the model itself,
            before temperature and changes.
        likeliest: int32 [R, K], the likeliest tokens in falling order, where asked for.
        logprobs: float32 [R, K], of them.
    """

    token: jax.Array
    logprob: jax.Array
    likeliest: jax.Array
    logprobs: jax.Array


def choose(logits: jax.Array, choices: Choices) -> Chosen:
    """Chooses a token for each row.

    Args:
        logits: [R, vocab].
    """
    logits = logits.astype(jnp.float32)
    changed = edited(logits, choices.edits)
    token = jax.lax.cond(
        jnp.any(jnp.asarray(choices.temperature) > 0),
        _drawn,
        lambda changed, _: jnp.argmax(changed, axis=-1).astype(jnp.int32),
        changed,
        choices,
    )
    token = jnp.where(jnp.asarray(choices.given) >= 0, choices.given, token)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    count = min(MOST_LISTED, logits.shape[-1])
    values, likeliest = jax.lax.cond(
        jnp.any(jnp.asarray(choices.listed)),
        lambda logprobs: tuple(jax.lax.top_k(logprobs, count)),
        lambda logprobs: (
            jnp.zeros((logprobs.shape[0], count), jnp.float32),
            jnp.zeros((logprobs.shape[0], count), jnp.int32),
        ),
        logprobs,
    )
    return Chosen(
        token=token,
        logprob=jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0],
        likeliest=likeliest,
        logprobs=values,
    )


def left(logits: jax.Array, choices: Choices) -> jax.Array:
    """Logits over the temperature, minus infinity where `Sampling` leaves a token out: by top_k,
    then by top_p of what is left, then by min_p, as `transformers` does; tokens as
    likely as the last one stay.

    Args:
        logits: float32 [R, vocab].
    """
    temperature = jnp.asarray(choices.temperature)
    scaled = logits / jnp.where(temperature == 0, 1.0, temperature)[:, None]
    likely = -jnp.sort(-scaled, axis=-1)
    vocab = likely.shape[-1]
    rank = jnp.arange(vocab)[None]
    limit = jnp.where(jnp.asarray(choices.top_k) > 0, choices.top_k, vocab)[:, None]
    likely = jnp.where(rank < limit, likely, -jnp.inf)
    odds = jax.nn.softmax(likely, axis=-1)
    before = jnp.cumsum(odds, axis=-1) - odds
    retained = (rank < limit) & (before < jnp.asarray(choices.top_p)[:, None])
    retained &= odds >= jnp.asarray(choices.min_p)[:, None] * odds[:, :1]
    retained |= rank == 0
    threshold = jnp.min(jnp.where(retained, likely, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)


def _drawn(logits: jax.Array, choices: Choices) -> jax.Array:
    def drawn(row: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.categorical(key, row)

    sampled = jax.vmap(drawn)(
        left(logits, choices), jnp.asarray(choices.seed), jnp.asarray(choices.position)
    )
    greedy = jnp.asarray(choices.temperature) == 0
    return jnp.where(greedy, jnp.argmax(logits, axis=-1), sampled).astype(jnp.int32)


# --------------------------------------------------------------------------------------------------
# Guides: masks of the tokens that may come next, by llguidance, where an answer has a form.
#
# Forms are a stranger's, and their compiler is native code: each form is compiled in a process of
# its own (`grammars.py`, `shardlib.untrusted.confined`), which then says the masks of all answers
# that have it. A form that takes too much ends its process and its answers, and nothing else.
# Compiling yields to everything else that the machine does, and so do the masks of a form that
# takes long for them.

#: Forms that no answer has and that stay compiled: a process each.
KEPT = 32
#: Forms that are compiled at a time.
LANES = 6
#: Of a form.
LIMITS = ChildLimits(seconds=2.0, memory_bytes=1 << 28, stack_bytes=1 << 23)
#: Seconds of a mask from which on its form yields to everything else.
SLOW_SECONDS = 0.005


class Guides:
    """Guides answers of a model. Forms may be compiled from any thread; guides belong to one.

    Args:
        tokens: bytes that each token spells; empty for those that spell none.
        ends: tokens that end an answer, at least one.
        vocab: size of the logits; tokens that spell nothing known never come.

    Raises:
        ArgumentError: there is no token that ends an answer, or one that the model does not have.
        MissingPackageError: llguidance is not there.
    """

    def __init__(self, tokens: Sequence[bytes], ends: Collection[int], *, vocab: int) -> None:
        if not ends or not all(0 <= token < len(tokens) for token in ends) or len(tokens) > vocab:
            raise ArgumentError(
                f"{len(tokens)} tokens are spelt, of which {sorted(ends)} end an answer; the model"
                f" has {vocab}, and at least one of those that are spelt ends an answer"
            )
        check_installed()
        self.ends, self.vocab = frozenset(ends), vocab
        self._words = -(-vocab // BITS)
        self._confined = Confined(
            Path(__file__).with_name("grammars.py"),
            given={"ends": sorted(ends)},
            body=b"".join(struct.pack("<I", len(token)) + token for token in tokens),
            limits=LIMITS,
        )
        self._confined.about()
        self._changed = threading.Condition()
        self._compiled: OrderedDict[Form, Compiled] = OrderedDict()
        self._compiling: set[Form] = set()
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix="forms")

    def compiled(self, form: Form) -> tuple[Future[Compiled], Callable[[], None]]:
        """A form is compiled beside everything else, and stays so until it is given back."""
        future = self._threads.submit(self._taken, form)

        def give_back() -> None:
            future.cancel()
            future.add_done_callback(self._given_back)

        return future, give_back

    def _given_back(self, future: Future[Compiled]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._leave(future.result())

    def guide(self, form: Form) -> Guide:
        """A guide of one answer, to be closed."""
        compiled = self._taken(form)
        return Guide(compiled, self._words, lambda: self._leave(compiled))

    def _taken(self, form: Form) -> Compiled:
        """A form that is used once more."""
        with self._changed:
            self._changed.wait_for(lambda: form not in self._compiling)
            if (cached := self._compiled.get(form)) is not None and not cached.ended:
                cached.users += 1
                self._compiled.move_to_end(form)
                return cached
            self._compiling.add(form)
        compiled: Compiled | None = None
        try:
            compiled = _compile(self._confined, form)
            return compiled
        finally:
            with self._changed:
                self._compiling.discard(form)
                if compiled is not None:
                    self._compiled[form] = compiled
                self._changed.notify_all()

    def _leave(self, released: Compiled) -> None:
        """A form is used once less; of those that nobody uses the newest stay."""
        with self._changed:
            released.users -= 1
            idle = [form for form, compiled in self._compiled.items() if not compiled.users]
            gone = [self._compiled.pop(form) for form in idle[: max(len(idle) - KEPT, 0)]]
            if not released.users and all(
                released is not compiled for compiled in self._compiled.values()
            ):
                gone.append(released)
        for compiled in gone:
            compiled.fork.close()


class Compiled:
    """A form in its process.

    Args:
        fork: the process.
        first: mask of the first token.
        slow: whether it has taken long for that.
    """

    def __init__(self, fork: Fork, first: bytes, *, slow: bool) -> None:
        self.fork, self.first, self.slow = fork, first, slow
        self.users, self.ended = 1, False
        self._answers: dict[int, Guide] = {}
        self._serials = itertools.count()

    def send(self, operation: str, answer: int, tokens: Sequence[int] = ()) -> int:
        """Asks for something; returns the serial number of what will be answered."""
        serial = next(self._serials)
        header = {"answer": answer, "tokens": list(tokens), "serial": serial}
        if not self.ended:
            try:
                self.fork.send(operation, header, background=self.slow)
            except RefusedError:
                self.ended = True
        return serial

    def begin(self, guide: Guide) -> int:
        """One more answer; returns its number."""
        number = next(self._serials)
        self._answers[number] = guide
        self.send("begin", number)
        return number

    def end(self, number: int) -> None:
        """One answer less."""
        self.send("end", number)
        del self._answers[number]

    def hear(self) -> None:
        """Gives what has come in to those who wait for it; waits for nothing."""
        while not self.ended:
            try:
                message = self.fork.receive(0.0, wait=False)
            except RefusedError:  # also a refusal: the library may be in any state
                self.ended = True
                return
            if message is None:
                return
            match message[0]:
                case {"answer": int(answer), "serial": int(serial), "seconds": float(seconds)}:
                    self.slow = seconds > SLOW_SECONDS
                case _:
                    self.ended = True
                    return
            if answer in self._answers:
                self._answers[answer].hear(serial, *message)


class Guide:
    """The tokens that may come next in one answer.

    Attributes:
        stopped: whether no token can follow, as far as was heard.
        failure: why the answer cannot go on; empty where it can.
        full: whether the answer has all tokens that it may have.
    """

    def __init__(self, form: Compiled, words: int, left: Callable[[], None]) -> None:
        self.form, self.stopped, self.failure, self.full = form, False, "", False
        self._words, self._left = words, left
        self._mask: bytes | None = form.first  # of the next token; None until it comes
        self._after: list[bytes] = []  # masks after guesses; empty where none can follow
        self._taken: list[int] = []
        self._serial = -1
        self._number = form.begin(self)

    @property
    def late(self) -> bool:
        """True if the mask of the next token is not there yet."""
        return self._mask is None

    def masks(self, rows: int, drafted: Sequence[int]) -> list[np.ndarray]:
        """Masks of the rows of a step, uint32 [W], as far as they are known."""
        assert self._mask is not None
        ready = [self._mask, *(mask for mask in self._after if mask)]
        masks = [self._any() for _ in range(rows - 1 - len(drafted))]
        masks += [self._array(mask) for mask in ready[: 1 + len(drafted)]]
        return [*masks, *(self._any() for _ in range(rows - len(masks)))]

    def guess(self, drafted: Sequence[int]) -> None:
        """Asks for the masks after tokens that may come; rows without one are not taken."""
        self._serial = self.form.send("guess", self._number, drafted)

    @property
    def guessing(self) -> bool:
        """True if the masks after guesses have not come yet."""
        return self._serial >= 0 and self._mask is not None

    def took(self, token: int) -> bool:
        """The answer has one more token; whether the row after it may be taken, too."""
        self._taken.append(token)
        after = self._after[len(self._taken) - 1 : len(self._taken)]
        return bool(after and after[0])

    def ask(self) -> None:
        """Asks for the mask after what was taken, if anything was."""
        if self._taken:
            self._mask, self._after = None, []
            self._serial = self.form.send("take", self._number, self._taken)
            self._taken = []

    def hear(self, serial: int, header: JsonMapping, body: bytes) -> None:
        """Takes a message of the process of the form."""
        size = len(self.form.first)
        if serial != self._serial:
            return
        self._serial = -1
        if len(body) % size or (self._mask is None and len(body) > size):
            self.form.ended = True
        elif self._mask is not None:
            self._after = [body[k : k + size] for k in range(0, len(body), size)]
        else:
            self._mask = body
            self.stopped, self.failure = not body, str(header.get("failure", ""))

    def close(self) -> None:
        """The answer has ended."""
        self.form.end(self._number)
        self._left()

    def _any(self) -> np.ndarray:
        return np.full(self._words, 0xFFFFFFFF, np.uint32)

    def _array(self, data: bytes) -> np.ndarray:
        mask = np.zeros(self._words, np.uint32)
        words = np.frombuffer(data, "<u4")
        mask[: len(words)] = words[: self._words]
        return mask


def check_installed() -> None:
    """Raises MissingPackageError where llguidance is not there."""
    if find_spec("llguidance") is None:
        raise MissingPackageError(
            "the form of an answer needs the package llguidance\nTry: pip install"
            " 'shardlib[structured]'"
        )


def _compile(confined: Confined, form: Form) -> Compiled:
    fork: Fork | None = None
    try:
        fork = confined.fork()
        header, first = fork.call(
            "compile", {"kind": form.kind}, form.text.encode("utf-8", "replace"), background=True
        )
        if not first or len(first) % 4:
            raise RefusedError("no answer has it")
        seconds = header.get("seconds")
        return Compiled(fork, first, slow=not isinstance(seconds, float) or seconds > SLOW_SECONDS)
    except RefusedError as error:
        if fork is not None:
            fork.close()
        raise ArgumentError(f"the form of the answer is not usable: {error}") from error


#: Seconds that a step waits for masks after guesses.
GUESS_SECONDS = 0.02


class Guided:
    """Requests whose answers have a form.

    Attributes:
        guides: of the model's tokens; None while nothing is known of what they spell.
    """

    def __init__(self) -> None:
        self.guides: Guides | None = None
        self._guided: dict[Request, Guide] = {}

    def request(self, number: int, generation: GenerationRequest) -> Request:
        """A request; one whose answer has a form ends with the tokens that end an answer."""
        if generation.form is None:
            return Request(number=number, asked=generation)
        if self.guides is None:
            raise ArgumentError(
                "an answer has a form, and nothing is known of what tokens spell\nTry:"
                " engine.spell(tokens, ends) before"
            )
        guide = self.guides.guide(generation.form)
        ends = generation.stop | self.guides.ends
        request = Request(number=number, asked=replace(generation, stop=ends))
        self._guided[request] = guide
        return request

    def settled(self, seconds: float) -> list[tuple[Request, str]]:
        """Requests that end as their forms say, and why. Those whose masks are late sit out the
        next step.

        Args:
            seconds: that masks are waited for.
        """
        ended = [request for request in self._guided if request.ended is not None]
        for request in ended:
            self._guided.pop(request).close()
        self._wait(self._guided.values(), lambda guide: guide.late, seconds)
        why = dict[Request, str]()
        for request, guide in self._guided.items():
            request.late = guide.late
            if guide.form.ended or guide.failure:
                why[request] = BROKEN
            elif not guide.late and (guide.stopped or guide.full):
                why[request] = STOP if guide.stopped else LENGTH
        return list(why.items())

    def masks(self, shares: Sequence[ScheduledChunk]) -> dict[int, list[np.ndarray]]:
        """Tokens that may come next in the rows of a step, by number of the request."""
        guides = {
            share: self._guided[share.request]
            for share in shares
            if share.ends and share.request in self._guided
        }
        for share, guide in guides.items():
            if share.drafted:
                guide.guess(share.drafted)
        self._wait(guides.values(), lambda guide: guide.guessing, GUESS_SECONDS)
        return {
            share.request.number: guide.masks(share.rows, share.drafted)
            for share, guide in guides.items()
        }

    def took(self, request: Request, token: int) -> bool:
        """A request has taken a token; whether the row after it may be taken, too."""
        guide = self._guided.get(request)
        if guide is None or token in request.asked.stop:
            return True
        if request.ended == LENGTH:  # unless the form says that it is whole
            request.ended, guide.full = None, True
        return guide.took(token) and not guide.full

    def ask(self) -> None:
        """Asks for the masks after all that was taken: they are computed beside everything else."""
        for request, guide in self._guided.items():
            if request.ended is None:
                guide.ask()

    def _wait(
        self, guides: Collection[Guide], waits: Callable[[Guide], bool], seconds: float
    ) -> None:
        until = time.monotonic() + seconds
        while forms := {guide.form for guide in guides if waits(guide) and not guide.form.ended}:
            for form in forms:
                form.hear()
            forms = {guide.form for guide in guides if waits(guide) and not guide.form.ended}
            left = until - time.monotonic()
            if left <= 0 or not forms:
                return
            connection.wait([form.fork for form in forms], left)  # type: ignore[arg-type]


#: A user's forward pass: (model, int32 tokens [batch, seq]) -> logits [batch, seq, vocab]; of a
#: Linen model with a cache of its own (logits, updated collections).
UserForward = Callable[[Tree, jax.Array], Tree]


def rows_of(share: ScheduledChunk) -> list[Row]:
    """The rows of a share, in order."""
    request, end = share.request, share.first + share.count
    rows: list[Row] = []
    for position in range(end - share.rows, end):
        drafted = position + 1 - request.count
        if drafted >= 0:
            rows.append(Row(request=request, drafted=share.drafted[:drafted]))
        else:
            rows.append(Row(request=request, given=request.tokens[position + 1]))
    return rows


def told(chosen: Chosen, rows: Mapping[int, Row]) -> dict[int, SampledToken]:
    """Returns the tokens chosen in each row, on the host."""
    tokens, logprobs = np.asarray(chosen.token).tolist(), np.asarray(chosen.logprob).tolist()
    listed = any(row.request.asked.top for row in rows.values())
    likeliest, values = (
        (np.asarray(chosen.likeliest).tolist(), np.asarray(chosen.logprobs).tolist())
        if listed
        else ([[]] * len(tokens), [[]] * len(tokens))
    )
    return {
        index: SampledToken(
            token=tokens[index],
            logprob=logprobs[index],
            likeliest=tuple(zip(likeliest[index], values[index], strict=True))[
                : row.request.asked.top
            ],
        )
        for index, row in rows.items()
    }
