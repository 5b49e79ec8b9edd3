"""Which tokens may come next, where an answer has a form: masks by llguidance.

Forms are a stranger's, and their compiler is native code: each form is compiled in a process of its
own (`grammars.py`, `shardlib.untrusted.confined`), which then says the masks of all answers that
have it. A form that takes too much ends its process and its answers, and nothing else. Compiling
yields to everything else that the machine does, and so do the masks of a form that takes long for
them.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from shardlib.errors import ArgumentError, MissingPackageError
from shardlib.serving.sampling.edits import BITS
from shardlib.serving.scheduling.forms import Form
from shardlib.untrusted.confined import ChildLimits, Confined, Fork, RefusedError
from shardlib.untrusted.json_types import JsonMapping

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
    """Which tokens may come next in one answer.

    Args:
        form: of it.
        words: of a mask.
        left: is called when it is closed.

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
        """Whether the mask of the next token is not there yet."""
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
        """Whether the masks after guesses have not come yet."""
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
        """What the process of the form says."""
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
