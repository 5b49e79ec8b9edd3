"""Pytrees by path: trained and frozen leaves, exact initialisation, and comparison.

Inputs that a program returns unchanged:

They are followed through calls, names of values and rematerialisation, and through scans: carries
that no iteration changes, and slices that are stacked again unchanged.

>>> import jax
>>> origins(jax.make_jaxpr(lambda x, y: (y, x + 1, jax.jit(lambda z: z)(x)))(1.0, 2.0))
[1, None, 0]

Trained and frozen arrays of the params:

A `Partition` extracts the trained part of a tree of params, and rebuilds the tree. Gradients,
optimizer state and updates are trees like the trained part; all others (layouts, states,
checkpoints) contain both.

>>> parts = Partition.of({"base": 1.0, "lora": {"a": 2.0, "b": 3.0}}, frozen={"base"})
>>> parts.trained({"base": 1.0, "lora": {"a": 2.0, "b": 3.0}})
{'lora': {'a': 2.0, 'b': 3.0}}
>>> parts.joined({"lora": {"a": 5.0, "b": 6.0}}, {"base": 1.0, "lora": {"a": 2.0, "b": 3.0}})
{'base': 1.0, 'lora': {'a': 5.0, 'b': 6.0}}

Trained leaves of a pytree, and all others:

A module of Equinox, or of any library whose modules are pytrees, has leaves that are not arrays:
activation functions, flags, rates. Its floating-point arrays are trained, its other arrays are
state that stays unchanged, and the rest is kept as the initialiser made it. The loss takes the
whole module.

>>> parts = SplitTree.of({"w": jax.ShapeDtypeStruct((2,), "float32"), "act": len})
>>> parts.split({"w": 1.0, "act": len})[0], parts.whole({"act": None, "w": 2.0}, {})
({'act': None, 'w': 1.0}, {'act': <built-in function len>, 'w': 2.0})

Equality of the structures of two pytrees up to recreated static functions:

`optax.adam(1e-3)`, a lambda and a bound method are new objects each time that they are made, so JAX
considers the states of two calls of one `init` trees of different structure.

>>> import jax, functools
>>> one, other = (jax.tree_util.Partial(lambda x: x, 1.0) for _ in range(2))
>>> jax.tree.structure(one) == jax.tree.structure(other)
False
>>> static_difference(*map(jax.tree.structure, (one, other)))
''
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core as jex
from jax.tree_util import PyTreeDef

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.errors import AnnotationError, raise_all
from shardlib.findings import Finding, diagnostic
from shardlib.jax_types import Eqn, Index, Jaxpr, KeyPath, Leaf, Value

_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def origins(jaxpr: Jaxpr) -> list[int | None]:
    """For each result, the position of the input that it equals; None if it is computed, or a
    constant.
    """
    body, _ = open_jaxpr(jaxpr)
    positions: dict[Value, int] = {var: position for position, var in enumerate(body.invars)}
    for eqn in body.eqns:
        for var, source in zip(eqn.outvars, _sources(eqn), strict=True):
            if not isinstance(source, jex.Literal) and source in positions:
                positions[var] = positions[source]
    return [None if isinstance(var, jex.Literal) else positions.get(var) for var in body.outvars]


def _sources(eqn: Eqn) -> Sequence[Any]:
    """For each result of an equation, the operand that it equals, or None."""
    if eqn.primitive.name == "name":
        return eqn.invars
    nothing = [None] * len(eqn.outvars)
    body = next((eqn.params[key] for key in _BODIES if key in eqn.params), None)
    if body is None:
        return nothing
    inner = origins(body)
    if len(inner) != len(eqn.outvars):
        return nothing
    if eqn.primitive.name != "scan":
        alike = len(open_jaxpr(body)[0].invars) == len(eqn.invars)
        return [eqn.invars[k] if alike and k is not None else None for k in inner]
    constants, carried = scan_counts(eqn.params)
    first = constants + carried
    return [
        eqn.invars[k]
        if k is not None and (k == constants + result if result < carried else k >= first)
        else None
        for result, k in enumerate(inner)
    ]


# --------------------------------------------------------------------------------------------------
# Paths of arrays, written with dots: "layers.mlp.up.kernel".

#: A pytree of arrays, tracers or `jax.ShapeDtypeStruct`, without boxes or metadata.
Tree = Any
#: A path as its parts: keys of dicts, names of fields, positions in lists.
Path = tuple[Any, ...]


def path_parts(path: KeyPath) -> Path:
    """The parts of a `jax.tree_util` key path."""
    return tuple(
        getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path
    )


def path_text(path: KeyPath) -> str:
    """A key path of `jax.tree_util` as dotted text, without brackets or quotes.

    >>> import jax
    >>> leaves = jax.tree_util.tree_leaves_with_path({"layers": [{"kernel": 1.0}]})
    >>> path_text(leaves[0][0])
    'layers.0.kernel'
    """
    return ".".join(map(str, path_parts(path)))


# --------------------------------------------------------------------------------------------------
# A compiled initialiser that gives exactly the numbers of the user's own constructor.
#
# A constructor runs op by op; compiled as one program, neighbouring ops are fused and constants
# folded, which changes last bits. Here optimisation barriers separate each op from its neighbours;
# functions that the constructor calls through `jax.jit` (JAX's random distributions, for example)
# stay one piece, as they do op by op. Layouts propagate through the barriers, so each device still
# initialises only its shard.


def op_by_op(function: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """The same function of a seed, which compiles without fusing its ops."""

    def fenced(seed: Index) -> Tree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(seed)
        values = dict(
            zip(
                (*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, seed), strict=True
            )
        )

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else values[atom]

        for eqn in closed.jaxpr.eqns:
            # A literal is an operand like any other, so that it is not folded.
            arguments = jax.lax.optimization_barrier(list(map(read, eqn.invars)))
            results = eqn.primitive.bind(*arguments, **eqn.primitive.get_bind_params(eqn.params))
            values.update(
                zip(
                    eqn.outvars,
                    jax.lax.optimization_barrier(
                        list(results) if eqn.primitive.multiple_results else [results]
                    ),
                    strict=True,
                )
            )
        leaves = [
            _array(leaf) if isinstance(leaf, jex.Literal) else values[leaf]
            for leaf in closed.jaxpr.outvars
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return fenced


def _array(literal: jex.Literal) -> jax.Array:
    """A leaf that no op makes, as an array: a literal's number has no shape, which optimizers
    read.
    """
    return jnp.asarray(literal.val, getattr(literal.aval, "dtype", None))


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The split of a tree of params into trained and frozen.

    Attributes:
        flags: for each leaf in tree order, whether it is trained.
    """

    flags: tuple[bool, ...]

    @staticmethod
    def of(params: Tree, frozen: Collection[str]) -> Partition:
        """The partition of params with the given dotted paths frozen."""
        return Partition(
            flags=tuple(
                (path_text(path) or "params") not in frozen
                for path, _ in jax.tree_util.tree_leaves_with_path(params)
            )
        )

    @property
    def whole(self) -> bool:
        """True if all params are trained."""
        return all(self.flags)

    def trained(self, params: Tree) -> Tree:
        """The trained part: dicts without frozen leaves, and None for these in other containers."""
        if self.whole:
            return params
        leaves, structure = jax.tree.flatten(params)
        return _pruned(
            structure.unflatten(
                [leaf if flag else None for leaf, flag in zip(leaves, self.flags, strict=True)]
            )
        )

    def joined(self, trained: Tree, params: Tree) -> Tree:
        """Params with another trained part."""
        if self.whole:
            return trained
        leaves, structure = jax.tree.flatten(params)
        fresh = iter(jax.tree.leaves(trained))
        return structure.unflatten(
            [next(fresh) if flag else leaf for leaf, flag in zip(leaves, self.flags, strict=True)]
        )

    def mapped(self, function: Callable[[Tree], Tree], params: Tree) -> Tree:
        """Params with a function applied to their trained part."""
        return self.joined(function(self.trained(params)), params)

    @property
    def numbers(self) -> dict[int, int]:
        """Positions of the trained leaves among all leaves -> among the trained ones."""
        trained = (position for position, flag in enumerate(self.flags) if flag)
        return {position: number for number, position in enumerate(trained)}


def _pruned(tree: Any) -> Any:
    """Nested dicts without empty branches."""
    if type(tree) is not dict:
        return tree
    branches = {key: _pruned(branch) for key, branch in tree.items()}
    return {key: branch for key, branch in branches.items() if jax.tree.leaves(branch)}


def is_array(leaf: Tree) -> bool:
    """True if a leaf is a concrete or abstract array."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitTree:
    """A tree with the positions of its trained leaves.

    Attributes:
        structure: structure of the whole tree.
        paths: paths of its leaves.
        kept: leaves that are not arrays, by position.
        trained: positions of floating-point arrays.
        fixed: positions of other arrays.
    """

    structure: jax.tree_util.PyTreeDef
    paths: tuple[str, ...]
    kept: dict[int, Any]
    trained: tuple[int, ...]
    fixed: tuple[int, ...]

    @staticmethod
    def of(tree: Tree) -> SplitTree:
        """Reads a tree."""
        leaves, structure = jax.tree.flatten(tree)
        paths = tuple(path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))
        trained = tuple(
            index
            for index, leaf in enumerate(leaves)
            if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
        fixed = tuple(
            index for index, leaf in enumerate(leaves) if is_array(leaf) and index not in trained
        )
        return SplitTree(
            structure=structure,
            paths=paths,
            kept={index: leaf for index, leaf in enumerate(leaves) if not is_array(leaf)},
            trained=trained,
            fixed=fixed,
        )

    def split(self, tree: Tree) -> tuple[Tree, Tree]:
        """(the tree with None for all untrained leaves, other arrays by path)."""
        leaves = jax.tree.leaves(tree)
        trained = jax.tree.unflatten(
            self.structure,
            [leaf if index in self.trained else None for index, leaf in enumerate(leaves)],
        )
        return trained, {self.paths[index]: leaves[index] for index in self.fixed}

    def whole(self, params: Tree, state: Tree) -> Tree:
        """The whole tree rebuilt from trained params and the other arrays."""
        arrays = dict(zip(self.trained, jax.tree.leaves(params), strict=True)) | {
            index: state[self.paths[index]] for index in self.fixed
        }
        return jax.tree.unflatten(
            self.structure,
            [
                self.kept[index] if index in self.kept else arrays[index]
                for index in range(len(self.paths))
            ],
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """A finding for numbers that are not trained."""
        numbers = [
            f"{self.paths[index]} = {leaf!r}"
            for index, leaf in self.kept.items()
            if isinstance(leaf, (bool, int, float, complex))
        ]
        numbers += [self.paths[index] for index in self.fixed]
        if not numbers:
            return ()
        return (
            Finding(
                code="not-trained",
                severity="info",
                where=numbers[0].split(" ")[0],
                message=(
                    f"{len(numbers)} leaves of the module are numbers or integer arrays and stay as"
                    f" they are: {', '.join(numbers[:8])}"
                ),
                hint="make an array of what is to be trained",
            ),
        )


#: Maximum number of characters of a value in a message.
SHOWN = 60


def static_difference(left: PyTreeDef, right: PyTreeDef) -> str:
    """The difference between two pytree structures; "" if they differ only in recreated static
    parts: functions of the same code, and objects of the same type that compare by identity.
    """
    if left == right:
        return ""
    first, second = left.node_data(), right.node_data()
    if first is None or second is None:
        return "" if first is second is None else "an array in the place of a node"
    if first[0] is not second[0]:
        return f"{first[0].__name__} in the place of {second[0].__name__}"
    if not _alike(first[1], second[1]):
        return f"{first[0].__name__}: {_shown(first[1])} and {_shown(second[1])}"
    left_children, theirs = left.children(), right.children()
    if len(left_children) != len(theirs):
        return f"{first[0].__name__} of {len(left_children)} parts and of {len(theirs)}"
    return next(filter(None, map(static_difference, left_children, theirs)), "")


def _alike(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, functools.partial):
        return _alike(
            (left.func, left.args, left.keywords), (right.func, right.args, right.keywords)
        )
    code = getattr(left, "__code__", None)  # bound methods have that of their function
    if code is not None:
        return code is getattr(right, "__code__", None)
    if type(left).__eq__ is object.__eq__:
        return True
    same = left == right
    return same if isinstance(same, bool) else bool(getattr(same, "all", lambda: False)())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


# --------------------------------------------------------------------------------------------------
# Selection of trained arrays by `wrt`, named as in Flax, with Flax's filters.
#
# For NNX, the arguments of `nnx.DiffState`: a type of variables (`nnx.LoRAParam`), `nnx.Any`,
# `nnx.All`, `nnx.Not`, a path predicate (path, variable) -> bool. Linen and plain pytrees have no
# types of variables: a predicate (path, leaf) -> bool, whose path is a tuple of strings,
# ("layers", "0", "lora_a").

#: The user's `wrt`.
Filter = Any
#: (path, variable or leaf) -> whether it is trained.
Predicate = Callable[[tuple[Any, ...], Any], bool]

#: Maximum number of arrays of each kind in an error.
_LISTED = 6


def nnx_predicate(wrt: Filter) -> Predicate:
    """A filter of Flax NNX as a predicate."""
    try:
        return nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError) as error:
        raise AnnotationError(
            f"wrt is {wrt!r}, of type {type(wrt).__name__}, not a filter of Flax\nTry: a type of"
            " variables such as nnx.LoRAParam, nnx.Any(...), nnx.All(...), nnx.Not(...), or a"
            " predicate (path, variable) -> bool"
        ) from error


def path_predicate(wrt: Filter, front: str) -> Predicate:
    """A predicate over paths for a model whose arrays have no types."""
    if not callable(wrt) or isinstance(wrt, type) or type(wrt).__module__.startswith("flax"):
        what = wrt.__name__ if isinstance(wrt, type) else repr(wrt)
        raise AnnotationError(
            f"wrt is {what}, and arrays of a {front} model have no types that a filter of NNX could"
            ' ask for\nTry: a predicate over paths, wrt=lambda path, leaf: "lora_a" in path'
        )
    return lambda path, leaf: bool(wrt(path, leaf))


def selected(
    predicate: Predicate,
    leaves: Mapping[Path, Leaf],
    kinds: Mapping[Path, str] | None = None,
) -> frozenset[Path]:
    """The paths that a predicate selects.

    Args:
        leaves: by path; their dtypes decide whether they can be trained.
    """
    paths: list[tuple[Any, ...]] = []
    for path, leaf in leaves.items():
        try:
            chosen = predicate(path, leaf)
        except Exception as error:
            raise AnnotationError(
                f"wrt failed when called with the path {path!r}: {type(error).__name__}: {error}"
            ) from error
        if chosen:
            paths.append(path)
    if not paths:
        raise AnnotationError(
            "wrt chooses nothing: every array would be frozen, and nothing would be trained\n"
            + _listed(leaves, kinds or {})
            + "\nTry: a filter that chooses some of these"
        )
    fixed = [
        f"{_dotted(path)} has dtype {leaves[path].dtype}"
        for path in paths
        if not jnp.issubdtype(leaves[path].dtype, jnp.inexact)
    ]
    if fixed:
        raise_all(
            AnnotationError,
            "wrt chooses arrays that have no gradient",
            fixed,
            hint="a filter that leaves out what is not floating-point",
        )
    return frozenset(paths)


def frozen_leaves(wrt: Filter, params: Tree, front: str) -> frozenset[str]:
    """Dotted paths of the leaves that `wrt` does not select; without `wrt`, of those that have no
    gradient.
    """
    if wrt is None:
        return frozenset(
            path_text(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact)
        )
    leaves = {
        tuple(map(str, path_parts(path))): (path_text(path) or "params", leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    trained = selected(
        path_predicate(wrt, front), {path: leaf for path, (_, leaf) in leaves.items()}
    )
    return frozenset(text for path, (text, _) in leaves.items() if path not in trained)


@diagnostic
def base_is_trained(trained: Mapping[Path, object]) -> tuple[Finding, ...]:
    """A finding if a model with adapters trains its base, too, without an explicit `wrt`."""
    adapters = [path for path, variable in trained.items() if isinstance(variable, nnx.LoRAParam)]
    others = len(trained) - len(adapters)
    if not adapters or not others:
        return ()
    return (
        Finding(
            code="base-trained",
            severity="warning",
            where=_short([_dotted(path) for path in adapters]),
            message=(
                f"the model has {len(adapters)} nnx.LoRAParam beside {others} other parameters, and"
                " all are trained: the base has gradients and optimizer state, too."
            ),
            hint=(
                "wrt=nnx.LoRAParam trains the adapters alone; wrt=nnx.Param says that all are to be"
                " trained"
            ),
        ),
    )


def _listed(leaves: Mapping[Path, Leaf], kinds: Mapping[Path, str]) -> str:
    """The arrays of the model by kind, for messages."""
    groups: dict[str, list[str]] = {}
    for path in leaves:
        groups.setdefault(kinds.get(path, ""), []).append(_dotted(path))
    lines = [f"  {f'{kind}: ' if kind else ''}{_short(paths)}" for kind, paths in groups.items()]
    return "\n".join(["the model has:", *lines]) if lines else "the model has no arrays"


def _short(paths: Sequence[str]) -> str:
    return ", ".join(paths[:_LISTED]) + (
        f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    )


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path)) or "params"
