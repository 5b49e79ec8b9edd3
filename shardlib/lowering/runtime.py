"""Values of a running program: training state, compiled executables, checksums of arrays, shards,
batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardlib._jax_compat import in_mesh, runnable
from shardlib.annotation.trees import Tree, path_text
from shardlib.errors import StateError, raise_all
from shardlib.jax_types import Leaf
from shardlib.lowering.random_keys import dtype_of, is_key
from shardlib.report.elements import bytes_text
from shardlib.report.markup import card
from shardlib.tracing.program import Equation, Program, flatten
from shardlib.tracing.rewriting import bind, needed

# --------------------------------------------------------------------------------------------------
# Transfers of batches to the devices of a program.


def shapes_of_batch(batch: Tree) -> Tree:
    """Shapes and dtypes of a batch as JAX has them, without shardings."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), dtype_of(leaf)), batch)


def put_batch(batch: Tree, target: Tree) -> Tree:
    """A batch on the devices; arrays that are in place already are unchanged.

    Args:
        batch: arrays of the required shapes and dtypes.
    """
    return jax.tree.map(_put_array, batch, target)


def call_arguments(batch: Tree, target: Tree) -> Tree:
    """A batch for the call of one compiled program: as `put_batch`, but NumPy arrays are left to
    the call, which transfers them for less than half the cost of transferring them one by one.

    Args:
        batch: arrays of the required shapes and dtypes.
    """
    if jax.process_count() > 1:  # a call compares host arrays between processes
        return put_batch(batch, target)
    return jax.tree.map(
        lambda leaf, aval: (
            np.asarray(leaf, aval.dtype) if isinstance(leaf, np.ndarray) else _put_array(leaf, aval)
        ),
        batch,
        target,
    )


def put_keys(keys: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Typed keys with a sharding; with several processes, each takes the shards of its devices."""
    if jax.process_count() == 1:
        return jax.device_put(keys, sharding)
    words, impl = np.asarray(jax.random.key_data(keys)), jax.random.key_impl(keys)
    spec = (*sharding.spec, *(None,) * (words.ndim - len(sharding.spec)))
    raw = jax.make_array_from_callback(
        words.shape,
        NamedSharding(sharding.mesh, PartitionSpec(*spec)),
        lambda index: words[index],
        dtype=words.dtype,
    )
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=sharding)(
        raw
    )


def _put_array(leaf: Any, target: jax.ShapeDtypeStruct) -> jax.Array:
    """A host array as the step expects it. With several processes, each transfers the shards of its
    devices; `jax.device_put` would have them compare the whole array first, in every step.
    """
    if isinstance(leaf, jax.Array) and leaf.sharding == target.sharding:
        return leaf
    if is_key(leaf):
        return put_keys(leaf, target.sharding)
    host = (
        np.asarray(leaf, target.dtype)
        if isinstance(leaf, (int, float, np.ndarray, np.generic))
        else leaf
    )
    if jax.process_count() > 1 and isinstance(host, np.ndarray):
        return jax.make_array_from_callback(
            target.shape, target.sharding, lambda index: host[index], dtype=target.dtype
        )
    return jax.device_put(host, target.sharding)


# --------------------------------------------------------------------------------------------------
# Checksums that detect a flipped bit on any mesh: two sums over the bits, independent of the
# layout.
#
# The bit patterns of the elements, as unsigned integers, are summed modulo 2**32 with weights that
# depend on the element's flat index alone. All weights are odd: a single flipped bit changes a sum
# by an odd multiple of a power of two below 2**32, which is never zero. The second weight
# scrambles the index (finaliser of MurmurHash3), so that errors that cancel in one sum do not
# cancel in the other. Integer addition wraps and is associative, so that the order, the mesh and
# the number of processes change nothing. Indices wrap too: elements that are 2**32 apart have the
# same weights.


def checksums(
    arrays: Mapping[str, jax.Array], shardings: Mapping[str, Sharding] | None = None
) -> jax.Array:
    """Two sums of every array, uint32 [arrays, 2], by sorted path; pure and jittable."""
    rows = [
        _sharded_checksums(arrays[path], (shardings or {}).get(path)) for path in sorted(arrays)
    ]
    return jnp.stack(rows) if rows else jnp.zeros((0, 2), jnp.uint32)


def _sharded_checksums(array: jax.Array, sharding: Sharding | None) -> jax.Array:
    """The sums of an array, from those of its shards. Under automatic partitioning, a reduction of
    two arrays at once would gather them.
    """
    if (
        not isinstance(sharding, NamedSharding)
        or not isinstance(sharding.mesh, Mesh)
        or jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    ):
        return _shard_checksums(array, array.shape, ())
    axes = [
        () if dim is None else dim if isinstance(dim, tuple) else (dim,) for dim in sharding.spec
    ]
    names = tuple(name for dim in axes for name in dim)

    def shard_checksums(local: jax.Array) -> jax.Array:
        offsets = tuple(
            lax.axis_index(dim) * local.shape[number] if dim else 0
            for number, dim in enumerate(axes)
        )
        sums = _shard_checksums(local, array.shape, offsets)
        return lax.psum(sums, names) if names else sums

    return jax.shard_map(
        shard_checksums,
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=PartitionSpec(),
        check_vma=False,
    )(array)


def _shard_checksums(shard: jax.Array, shape: tuple[int, ...], offsets: Sequence[Any]) -> jax.Array:
    """The sums of a shard of an array with a global shape; its first element is at `offsets`, and
    at 0 for further dims.
    """
    bits = _bits(shard)
    index = _flat_index(bits.shape, (*shape, *bits.shape[shard.ndim :]), offsets)
    zero = jnp.uint32(0)
    return jnp.stack(
        lax.reduce(
            (bits * (2 * index + 1), bits * (_scrambled(index) | 1)),
            (zero, zero),
            lambda left, right: (left[0] + right[0], left[1] + right[1]),
            tuple(range(bits.ndim)),
        )
    )


def _bits(array: jax.Array) -> jax.Array:
    """The bits of every element as uint32, with an inner dim of 2 for 64-bit elements and for
    complex ones.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return _bits(jnp.stack([array.real, array.imag], -1))
    if jnp.issubdtype(array.dtype, jnp.floating):
        return lax.bitcast_convert_type(
            array, _UNSIGNED[min(jnp.finfo(array.dtype).bits, 32)]
        ).astype(jnp.uint32)
    if array.dtype.itemsize > 4:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return array.astype(jnp.uint32)


_UNSIGNED = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _flat_index(
    local: tuple[int, ...], shape: tuple[int, ...], offsets: Sequence[Any]
) -> jax.Array:
    """Flat indices of a shard's elements in the global array."""
    index = jnp.zeros(local, jnp.uint32)
    for dim in range(len(local)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        position = lax.broadcasted_iota(jnp.uint32, local, dim) + jnp.asarray(
            offsets[dim] if dim < len(offsets) else 0
        ).astype(jnp.uint32)
        index += position * jnp.uint32(stride)
    return index


def _scrambled(index: jax.Array) -> jax.Array:
    mixed = (index ^ (index >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def checksums_by_path(
    arrays: Mapping[str, jax.Array], rows: np.ndarray
) -> dict[str, tuple[int, int]]:
    """The result of `checksums` on the host, by path.

    Args:
        rows: uint32 [arrays, 2], in the order of the sorted paths.
    """
    return {
        path: (int(row[0]), int(row[1])) for path, row in zip(sorted(arrays), rows, strict=True)
    }


# --------------------------------------------------------------------------------------------------
# Donated states. A step donates its input state, whose buffers are reused for the next state.

_IS_DELETED = methodcaller("is_deleted")
#: Number of leaves listed in an error.
MAX_LISTED = 3


def require_not_donated(caller: str, state: Tree) -> None:
    """Raises if arrays of a state were donated or deleted; a compiled program would read freed
    memory, which kills the process on simulated devices.
    """
    try:
        # Hundreds of leaves in every step: some tens of microseconds.
        deleted = any(map(_IS_DELETED, jax.tree.leaves(state)))
    except (AttributeError, jax.errors.JAXTypeError):  # arrays of NumPy, or traced ones
        deleted = any(map(_deleted, jax.tree.leaves(state)))
    if not deleted:
        return
    paths = [
        path_text(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if _deleted(leaf)
    ]
    more = [f"and {len(paths) - MAX_LISTED} more"] if len(paths) > MAX_LISTED else []
    raise_all(
        StateError,
        f"the state given to {caller} is no longer there: a step donates the buffers of its"
        " input state",
        [*(f"{path} was deleted" for path in paths[:MAX_LISTED]), *more],
        hint="use the state that step returned: state, metrics = program.step(state, batch)",
    )


def _deleted(leaf: Any) -> bool:
    return hasattr(leaf, "is_deleted") and not isinstance(leaf, Tracer) and leaf.is_deleted()


# --------------------------------------------------------------------------------------------------
# A compiled function of arrays that neither reads unused arguments nor returns its arguments.
#
# The residuals of a forward pass are in part its arguments: these are kept by the caller, not
# copied by the program. The same applies to duplicate results.

#: Arrays in some order.
Arrays = list[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedFunction:
    """A traced function.

    Attributes:
        program: its jaxpr.
        equations: those that its results need.
        inputs: abstract arguments, with their shardings.
        read_inputs: positions of the arguments that it reads.
        computed: positions of results that it computes, without duplicates.
        sources: for every result, (whether it is computed, its position in `computed` or among the
            inputs).
    """

    program: Program
    equations: tuple[Equation, ...]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    read_inputs: tuple[int, ...]
    computed: tuple[int, ...]
    sources: tuple[tuple[bool, int], ...]

    @staticmethod
    def of(
        function: Callable[..., Arrays], inputs: Sequence[jax.ShapeDtypeStruct], mesh: Mesh
    ) -> TracedFunction:
        """Traces a function."""
        with in_mesh(mesh):
            return TracedFunction.of_program(flatten(jax.make_jaxpr(function)(*inputs)), inputs)

    @staticmethod
    def of_program(program: Program, inputs: Sequence[jax.ShapeDtypeStruct]) -> TracedFunction:
        """A traced program, without equations that its outputs do not need."""
        positions = {number: k for k, number in enumerate(program.inputs)}
        computed = [*dict.fromkeys(number for number in program.outputs if number not in positions)]
        indices = {number: k for k, number in enumerate(computed)}
        equations, reads = needed(program.equations, computed)
        return TracedFunction(
            program=program,
            equations=tuple(equations),
            inputs=tuple(inputs),
            read_inputs=tuple(k for k, number in enumerate(program.inputs) if number in reads),
            computed=tuple(program.outputs.index(number) for number in computed),
            sources=tuple(
                (False, positions[number]) if number in positions else (True, indices[number])
                for number in program.outputs
            ),
        )

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of all results."""
        avals = [self.program.avals[number] for number in self.program.outputs]
        return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)

    @property
    def on_host(self) -> tuple[bool, ...]:
        """For each result, whether it is in host memory."""
        avals = [self.program.avals[number] for number in self.program.outputs]
        return tuple(aval.memory_space == jax.memory.Space.Host for aval in avals)

    def without_inputs(self, dropped: Collection[int]) -> TracedFunction:
        """The function without inputs that it does not read."""
        kept = [k for k in range(len(self.inputs)) if k not in dropped]
        index = {k: position for position, k in enumerate(kept)}
        return replace(
            self,
            program=replace(self.program, inputs=tuple(self.program.inputs[k] for k in kept)),
            inputs=tuple(self.inputs[k] for k in kept),
            read_inputs=tuple(index[k] for k in self.read_inputs),
            sources=tuple((computed, k if computed else index[k]) for computed, k in self.sources),
        )

    def compiled(
        self,
        name: str,
        mesh: Mesh,
        *,
        shardings: Sequence[NamedSharding | None] = (),
        donated: Sequence[int] = (),
    ) -> Executable:
        """Compiles it.

        Args:
            shardings: required shardings of results; None leaves one to the compiler.
            donated: positions of donated inputs.
        """
        requested = [*shardings, *[None] * (len(self.sources) - len(shardings))]

        def run(*read: Any) -> Arrays:
            env = {
                **self.program.constants,
                **{
                    self.program.inputs[k]: leaf
                    for k, leaf in zip(self.read_inputs, read, strict=True)
                },
            }
            for equation in self.equations:
                env.update(
                    zip(
                        equation.outputs,
                        bind(equation, [env[number] for number in equation.inputs]),
                        strict=True,
                    )
                )
            return [env[self.program.outputs[k]] for k in self.computed]

        run.__name__ = run.__qualname__ = name
        argnums = tuple(i for i, k in enumerate(self.read_inputs) if k in set(donated))
        with in_mesh(mesh):
            jitted = jax.jit(
                run, donate_argnums=argnums, out_shardings=[requested[k] for k in self.computed]
            )
            arguments = tuple(self.inputs[k] for k in self.read_inputs)
            compiled = jitted.lower(*arguments).compile()
        return Executable(
            compiled=compiled,
            run=runnable(jitted, compiled, arguments, mesh),
            read_inputs=self.read_inputs,
            sources=self.sources,
            traced=self,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Executable:
    """A compiled `TracedFunction`.

    Attributes:
        compiled: the compiled program.
        run: the function that calls it.
        read_inputs, sources: see `TracedFunction`.
    """

    compiled: jax.stages.Compiled
    run: Callable[..., Any]
    read_inputs: tuple[int, ...]
    sources: tuple[tuple[bool, int], ...]
    traced: TracedFunction

    def __call__(self, inputs: Sequence[jax.Array]) -> Arrays:
        """The results for all inputs; inputs that are not read may be placeholders."""
        results = self.run(*[inputs[k] for k in self.read_inputs])
        return [results[k] if computed else inputs[k] for computed, k in self.sources]

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Abstract results, with their shardings."""
        output_shardings = jax.tree.leaves(self.compiled.output_shardings)
        shardings = [
            output_shardings[k] if computed else self.traced.inputs[k].sharding
            for computed, k in self.sources
        ]
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.traced.results, shardings, strict=True)
        ]


# --------------------------------------------------------------------------------------------------
# Shards of the arrays of a tree, drawn by treescope (`treescope.render_array_sharding`).
#
# Values are neither shown nor read, so that nothing is computed or transferred, whatever the size
# of an array and wherever its shards are.

#: Most arrays and devices for which a tree is drawn: the drawing has a colour per device.
_ARRAYS, _DEVICES = 200, 64
#: Number of lines up to which the tree is expanded.
_LINES = 100


def sharding_tree(parts: Mapping[str, Tree]) -> str:
    """HTML that transfers nothing; empty without treescope, with donated arrays, and with too many
    arrays or devices to look at.
    """
    arrays = [leaf for leaf in jax.tree.leaves(dict(parts)) if isinstance(leaf, jax.Array)]
    if not 0 < len(arrays) <= _ARRAYS or any(leaf.is_deleted() for leaf in arrays):
        return ""
    if max(len(leaf.sharding.device_set) for leaf in arrays) > _DEVICES:
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # treescope uses deprecated NumPy names
        return _drawn(jax.tree.map(_without_keys, dict(parts)))


def _drawn(parts: dict[str, Tree]) -> str:
    try:
        import treescope
    except ImportError:
        return ""

    def shown(value: Any, path: str | None) -> Any:
        """The drawing of an array in place of its values."""
        if not isinstance(value, jax.Array):
            return None
        figure: Any = treescope.render_array_sharding(value)
        return treescope.IPythonVisualization(figure, replace=True)

    with (
        treescope.active_autovisualizer.set_scoped(shown),
        treescope.using_expansion_strategy(max_height=_LINES, target_width=1),
    ):
        return treescope.render_to_html(parts, compressed=True)


def _without_keys(leaf: Any) -> Any:
    """A leaf, or shape and dtype of random keys, which treescope would print."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


#: Number of arrays listed, the largest first.
_MAX_ROWS = 40
_HEAD = ("array", "shape", "dtype", "sharded over", "per device")


def state_card(title: str, parts: Mapping[str, Tree]) -> str:
    """The arrays of a state as HTML; nothing is transferred from devices."""
    rows: list[tuple[int, tuple[str, ...]]] = []
    lines: list[str] = []
    for name, tree in parts.items():
        sized_rows = [
            _row(f"{name}{jax.tree_util.keystr(path)}", leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        ]
        if sized_rows:
            local = bytes_text(sum(size for size, _ in sized_rows))
            lines.append(f"{name}: {len(sized_rows)} arrays, {local} per device")
        rows += sized_rows
    rows.sort(key=lambda row: -row[0])
    if len(rows) > _MAX_ROWS:
        lines.append(f"the {_MAX_ROWS} largest of {len(rows)} arrays:")
    tree = "which device has which part, as a tree", sharding_tree(parts)
    return card(title, lines, rows=[row for _, row in rows[:_MAX_ROWS]], head=_HEAD, folded=tree)


def _row(name: str, leaf: Any) -> tuple[int, tuple[str, ...]]:
    """Bytes per device of an array, and its row."""
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape)
    local = sharding.shard_shape(shape) if sharding is not None else shape
    size = math.prod(local) * leaf.dtype.itemsize
    over = str(tuple(sharding.spec)) if isinstance(sharding, NamedSharding) else "-"
    shown = " x ".join(map(str, shape)) or "scalar"
    return size, (name, shown, str(leaf.dtype), over, bytes_text(size))


# --------------------------------------------------------------------------------------------------
# Training state.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GuardState:
    """State of the guards, carried from step to step (`shardlib.lowering.step`); None for guards
    that are not used.

    Attributes:
        scale: scale of the loss, float32 scalar.
        good: steps since the scale changed, int32 scalar.
        limit: a step whose loss is above it is skipped, float32 scalar.
    """

    scale: Any = None
    good: Any = None
    limit: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """A pytree with everything that a step reads and writes; a step donates it.

    Attributes:
        step: number of steps done, including skipped ones, int32 scalar.
        params: trained and frozen arrays, nested dicts.
        model_state: state that the model itself updates (random streams, batch statistics).
        opt_state: the optimizer's state.
        guard: state of the guards; None without guards.
    """

    step: Any
    params: Tree
    model_state: Tree
    opt_state: Tree
    guard: GuardState | None = None

    def __repr__(self) -> str:
        parts = (
            ("params", self.params),
            ("model state", self.model_state),
            ("optimizer state", self.opt_state),
        )
        counts = [
            f"{len(leaves)} arrays of {name}"
            for name, tree in parts
            if (leaves := jax.tree.leaves(tree))
        ]
        return f"<TrainState {', '.join(counts)}>"

    def _repr_html_(self) -> str:
        parts = {
            "params": self.params,
            "model state": self.model_state,
            "optimizer state": self.opt_state,
        }
        return state_card(repr(self), parts)

    @property
    def inference(self) -> dict[str, Tree]:
        """The parts that an evaluation needs: parameters and model state."""
        return {"params": self.params, "model_state": self.model_state}

    @property
    def loss_state(self) -> Tree:
        """Model state as the loss takes it, with the scale of the loss if there is one."""
        return (
            self.model_state
            if self.guard is None or self.guard.scale is None
            else scaled_state(self.model_state, self.guard.scale)
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Results of the first half of a step: a pytree, for the second half.

    Attributes:
        params: gradients of the trained parameters, a tree like them, sharded as the optimizer
            reads them; multiplied by the scale of the loss, if there is one.
        loss: of the batch.
        metrics: the user's own, by name.
        model_state: updated by the model itself.
    """

    params: Tree
    loss: Any
    metrics: dict[str, Any]
    model_state: Tree


def scaled_state(model_state: Tree, scale: Leaf) -> dict[str, Tree]:
    """Model state together with the scale of the loss."""
    return {"model": model_state, "scale": scale}
