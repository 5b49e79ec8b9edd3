"""The exceptions of the package, a small family.

Each error is also the builtin a user would catch: a bad spelling is a `ValueError`, a missing file
a `FileNotFoundError`. A message answers five questions: which function and argument, what was
asked, what was found, which rule it breaks, what to try. All failures of one kind are reported
together:

>>> try:
...     dims = ["params.a dim 0", "params.b dim 1"]
...     raise_all(LayoutError, "2 dims do not divide", dims, hint="pad them")
... except ValueError as error:
...     print(error)
2 dims do not divide:
  - params.a dim 0
  - params.b dim 1
Try: pad them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

#: What stands between a message and what the user could try.
HINT = "\nTry: "
#: Where the pages of the documentation are, for who has the package alone.
PAGES = "https://shardlib.github.io/shardlib/docs"


class ShardlibError(Exception):
    """Base of every error that shardlib raises on purpose.

    Attributes:
        failures: what is wrong, one by one, where `raise_all` lists it; otherwise ().
    """

    failures: tuple[str, ...] = ()


class AnnotationError(ShardlibError, ValueError):
    """Logical axis names that do not fit the arrays they name."""


class ArgumentError(ShardlibError, TypeError, ValueError):
    """An argument of another kind than is asked for, or out of its range."""


class RuleError(ShardlibError, ValueError):
    """A sharding rule that is misspelt, malformed or contradicts another."""


class LayoutError(ShardlibError, ValueError):
    """A layout that does not fit a shape: wrong rank, a mesh axis used twice, a dim that does not
    divide.
    """


class TopologyError(ShardlibError, ValueError):
    """A topology that does not parse, or that the catalogue does not know."""


class PinError(ShardlibError, ValueError):
    """A pinned decision that is misspelt, out of range, or contradicts another pin."""


class InfeasibleError(ShardlibError, ValueError):
    """No plan satisfies the constraints; the message names the smallest relaxation found.

    Attributes:
        short_bytes: bytes that a device lacks for the leanest plan; 0 where memory is not what is
            lacking.
        message: what does not fit, and what to relax; `str(error)`.
    """

    def __init__(self, message: str, *, short_bytes: int = 0) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class PlanError(ShardlibError, ValueError):
    """A stored plan that cannot be read, or a plan that cannot be made in the way that was asked
    for.
    """


class BatchError(ShardlibError, ValueError):
    """A batch whose shapes cannot be spread as asked."""


class TracingError(ShardlibError, ValueError):
    """A loss or an initialiser that cannot be traced."""


class ModelError(ShardlibError, ValueError):
    """A model name, configuration file or model card that cannot be understood."""


class SettingsError(ArgumentError, ModelError, PlanError):
    """Settings of a run, or guards of a step, that cannot be used.

    It is a `ModelError` and a `PlanError` too, since callers catch those for numbers out of range.
    """


class DataError(ShardlibError, ValueError):
    """Training data that is empty, too small or unreadable."""


class TrainingError(ShardlibError, ArithmeticError):
    """A training run whose numbers are no longer finite."""


class CheckpointError(ShardlibError, RuntimeError):
    """A checkpoint that cannot be written or read, or that is of something else than what is to be
    restored.
    """


class StateError(ShardlibError, RuntimeError):
    """A state of training whose arrays are no longer there, or that is none of the program that it
    is given to.
    """


class DiskError(ShardlibError, RuntimeError):
    """State of a run that rests on disk and cannot be written or read there."""


class RunError(ShardlibError, ValueError):
    """A folder of a run that is another one's, or that cannot be used."""


class OwnedError(RunError):
    """A folder that another process writes to.

    Attributes:
        host: name of the other process's machine; empty where it is not known.
        pid: of the process there; 0 where it is not known.
        since: when it began, UTC; empty where it is not known.
        message: whose folder it is; `str(error)`.
    """

    def __init__(self, message: str, *, host: str = "", pid: int = 0, since: str = "") -> None:
        super().__init__(message)
        self.host, self.pid, self.since = host, pid, since


class LaunchError(ShardlibError, RuntimeError):
    """A job that cannot be described, submitted or started, or processes that do not fit each
    other.

    Attributes:
        again: whether another start with the same words may go well: somebody was late or is gone,
            a port was taken.
        message: what is wrong, and what to try; `str(error)`.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


class StoppedError(ShardlibError, RuntimeError):
    """A run that was asked to end, and has saved what it did."""


class MissingFileError(ShardlibError, FileNotFoundError):
    """A file that the user named and that is not there."""


class MissingPackageError(ShardlibError, ImportError):
    """A package that a request needs and that is not installed."""


class VerificationError(ShardlibError, RuntimeError):
    """A program that cannot be handed to a compiler, or a report that cannot be read."""


def raise_all(
    kind: type[ShardlibError], what: str, failures: Sequence[str], *, hint: str = ""
) -> NoReturn:
    """Raises one `kind` that lists every failure; plainly when there is only one."""
    assert failures, "raise_all needs at least one failure"
    body = (
        f"{what}: {failures[0]}" if len(failures) == 1 else "\n  - ".join([f"{what}:", *failures])
    )
    error = kind(f"{body}{HINT}{hint}" if hint else body)
    error.failures = (*failures[:-1], f"{failures[-1]}{HINT}{hint}" if hint else failures[-1])
    raise error


def hoisted(failures: Sequence[str]) -> tuple[list[str], str]:
    """Failures without what each says to try, and all of that as one hint.

    >>> hoisted(["zero is 7\\nTry: 0 to 3", "remat is 1"])
    (['zero is 7', 'remat is 1'], '0 to 3')

    Args:
        failures: one line per failure, some with a second line "Try: ...".
    """
    parts = [one.partition(HINT) for one in failures]
    hints = dict.fromkeys(hint for _, _, hint in parts if hint)
    return [says for says, _, _ in parts], "; ".join(hints)
