"""Parameters as they are sent: trained arrays by path, in the order of the tree.

What NumPy has no dtype for (bfloat16, float8) is sent as float32, which holds it exactly. Scalars
are sent with one dim: engines clip and scale arrays in place, which a NumPy scalar ignores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ArgumentError, TrainingError, raise_all
from shardlib.jax_types import Leaf
from shardlib.lowering.islands.halves import by_path, trained, with_trained
from shardlib.untrusted.shown import bounded

if TYPE_CHECKING:
    from shardlib.lowering.program.program import Program
    from shardlib.lowering.runtime.state import TrainState

#: Arrays by path, in order.
Arrays = Mapping[str, np.ndarray]


def arrays(program: Program, state: TrainState) -> dict[str, np.ndarray]:
    """The trained parameters of a state as they are sent."""
    return sent(by_path(program.model.partition.trained(state.params)))


def sent(leaves: Mapping[str, Leaf]) -> dict[str, np.ndarray]:
    """Arrays on the host, in dtypes that NumPy writes."""
    return {path: np.atleast_1d(_plain(np.asarray(leaf))) for path, leaf in leaves.items()}


def _plain(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)


def received(program: Program, sent: Arrays | Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """What was sent, as the arrays of a program."""
    expected = trained(program)
    if not sent:
        raise ArgumentError(
            "there are no parameters: no client has answered with any\nTry: Flower's log, which has"
            " what each client says"
        )
    if not isinstance(sent, Mapping):
        if len(sent) != len(expected):
            raise ArgumentError(
                f"the parameters are those of another model: {len(sent)} arrays, and"
                f" {program.plan.model} trains {len(expected)}"
            )
        sent = dict(zip(expected, sent, strict=True))
    failures = [
        *_differing(expected, sent),
        *(f"{path} is not known" for path in sent.keys() - expected.keys()),
    ]
    if failures:
        raise_all(
            ArgumentError,
            f"the parameters are those of another model than {program.plan.model}",
            bounded(failures),
        )
    with np.errstate(over="ignore"):  # what a smaller dtype cannot hold is infinite in it
        cast_arrays = {path: sent[path].astype(leaf.dtype) for path, leaf in expected.items()}
    require_finite(sent, "parameters that were received")
    require_finite(cast_arrays, "parameters that were received, in the dtypes of the model,")
    return {path: sent[path].reshape(leaf.shape) for path, leaf in expected.items()}


def _differing(expected: Mapping[str, jax.ShapeDtypeStruct], sent: Arrays) -> list[str]:
    failures: list[str] = []
    for path, leaf in expected.items():
        if path not in sent:
            failures.append(f"{path} is missing")
        elif np.shape(sent[path]) not in (leaf.shape, leaf.shape or (1,)):
            failures.append(f"{path} is {list(np.shape(sent[path]))}, not {list(leaf.shape)}")
        elif sent[path].dtype.kind != _plain(np.empty(0, leaf.dtype)).dtype.kind:
            failures.append(f"{path} is {sent[path].dtype}, not {leaf.dtype}")
    return failures


def require_finite(arrays: Arrays, what: str) -> None:
    """Refuses arrays that are not finite."""
    wrong = [path for path, array in arrays.items() if not np.isfinite(array).all()]
    if wrong:
        raise TrainingError(f"{what} are not finite: {', '.join(bounded(wrong))}")


def placed(program: Program, params: Tree, sent: Arrays | Sequence[np.ndarray]) -> Tree:
    """Parameters of which the trained ones are those that were sent."""
    return with_trained(program, params, received(program, sent))
