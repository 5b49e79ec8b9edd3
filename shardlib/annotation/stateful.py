"""What does a pytree model look like that carries state beside its params?

Haiku's `hk.transform_with_state(f).init` makes `(params, state)`, Equinox's
`eqx.nn.make_with_state(Module)` makes `(module, state)`. The first is trained, the second is what a
training step itself changes: statistics of the batch, averages, counters. The loss gets the pair,
and returns the state of the next step last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from shardlib import _jax_compat
from shardlib.annotation.result import loss_and_metrics
from shardlib.annotation.trees.parts import Parts, is_array
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import AnnotationError, TracingError, raise_all
from shardlib.jax_types import Metrics, Value

#: What a loss of such a model may return.
FORMS = "(loss, state) or (loss, metrics, state)"


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A model and its state, and what of them are arrays.

    Attributes:
        model: the leaves of the model.
        state: the leaves of its state, of which all arrays may change.
    """

    model: Parts
    state: Parts

    @staticmethod
    def of(initialised: Tree, name: str) -> Pair:
        """Reads what an initialiser made."""
        if not isinstance(initialised, tuple) or len(initialised) != 2:
            raise AnnotationError(
                f"initialiser {name!r} made a {type(initialised).__name__}; with stateful=True it"
                " makes a pair (params, state)\nTry: what hk.transform_with_state(f).init and"
                " eqx.nn.make_with_state(Module) make"
            )
        pair = Pair(model=Parts.of(initialised[0]), state=Parts.of(initialised[1]))
        if not pair.model.trained:
            raise AnnotationError(
                f"initialiser {name!r} made no floating-point arrays as the first of its pair, of"
                f" {len(pair.model.paths)} leaves\nTry: (params, state), in this order"
            )
        if not pair.arrays:
            raise AnnotationError(
                f"initialiser {name!r} made a state without arrays\nTry: shardlib.tree without"
                " stateful=True"
            )
        return pair

    @property
    def arrays(self) -> tuple[int, ...]:
        """Positions of the arrays of the state among its leaves."""
        return tuple(sorted(self.state.trained + self.state.fixed))

    def split(self, pair: Tree) -> tuple[Tree, Tree]:
        """(what is trained, the arrays of everything else by path)."""
        params, constants = self.model.split(pair[0])
        return params, {"model": constants, "state": self._by_path(pair[1])}

    def _by_path(self, state: Tree) -> dict[str, Tree]:
        leaves = jax.tree.leaves(state)
        return {self.state.paths[index]: leaves[index] for index in self.arrays}

    def whole(self, params: Tree, state: Tree) -> Tree:
        """The pair around what is trained and the arrays of everything else."""
        leaves = [
            self.state.kept[index] if index in self.state.kept else state["state"][path]
            for index, path in enumerate(self.state.paths)
        ]
        return (
            self.model.whole(params, state["model"]),
            jax.tree.unflatten(self.state.structure, leaves),
        )

    def after(self, result: Tree, state: Tree) -> tuple[Value, Metrics, Tree]:
        """Splits what a loss returned."""
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            returned = (
                f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            )
            raise TracingError(
                f"the loss of a model with state returned {returned}; expected {FORMS}\nTry: return"
                " the new state last, in an evaluation, too"
            )
        self._require_like(result[-1], state["state"])
        value, metrics = loss_and_metrics(result[:-1] if len(result) == 3 else result[0])
        return value, metrics, {**state, "state": self._by_path(result[-1])}

    def _require_like(self, after: Tree, before: dict[str, Tree]) -> None:
        if jax.tree.structure(after) != self.state.structure:
            raise TracingError(
                "the loss returned a state of another structure than it was given:"
                f" {jax.tree.structure(after)}, and not {self.state.structure}\nTry: {FORMS}, with"
                " the state that apply or the module returns"
            )
        arrays = self._by_path(after)
        wrong = [
            f"{path}: {_spelt(arrays[path])}, and not {_spelt(array)}"
            for path, array in before.items()
            if not is_array(arrays[path]) or _spelt(arrays[path]) != _spelt(array)
        ]
        if wrong:
            raise_all(
                TracingError,
                "the loss returned a state whose arrays are not like those it was given",
                wrong,
                hint="the state of every step has the shapes and dtypes of the first",
            )


def _spelt(array: Tree) -> str:
    return f"{array.dtype}{list(array.shape)}" if is_array(array) else type(array).__name__


def bound(pair: Pair) -> Callable[[Callable[..., Tree]], Callable[..., Tree]]:
    """What makes a pure loss of the user's."""

    def bind(loss: Callable[..., Tree]) -> Callable[..., Tree]:
        @_jax_compat.unsharded_variables()
        def pure(params: Tree, state: Tree, batch: Tree) -> Tree:
            value, metrics, after = pair.after(loss(pair.whole(params, state), batch), state)
            return value, (metrics, after)

        return pure

    return bind
