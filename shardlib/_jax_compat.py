"""The only file that knows JAX and Flax versions: one function per difference, with the versions
beside it.

Supported: JAX 0.10.2 with Flax 0.12.8 (Python 3.11) and JAX 0.12 with Flax 0.12.12 (Python 3.12 and
newer).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

from shardlib.jax_types import EqnParams, Value

if TYPE_CHECKING:
    import jax
    from jax.sharding import AbstractMesh, Mesh

#: A jaxpr, closed or not: its classes differ from one version to another.
AnyJaxpr: TypeAlias = Any
#: Dtypes of fewer than 8 bits.
SUB_BYTE = frozenset({"int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"})
#: The client of JAX's coordination service, which has no public name.
CoordinationClient: TypeAlias = Any


@contextmanager
def names_alone(apply: Callable[..., Any] | None = None) -> Iterator[None]:
    """A context in which variables of Flax NNX and boxes of Flax Linen have their names, and Flax
    puts nothing anywhere because of them (Flax 0.12.8 to 0.12.12 alike).

    Outside of it an annotated variable that is made without a mesh is an error, and so is, under a
    mesh, a layer that takes the box off its flattened kernel, as `nn.DenseGeneral` does: Flax
    applies the names of all dims to two. There is no switch for boxes, nor for variables that have
    `eager_sharding=True` or a mesh of their own, so the three functions of Flax that apply names
    are replaced by ones that ask this context first.

    Args:
        apply: (value of a new variable, its names, its rules, its mesh) -> value, in the place of
            Flax's own function; by default that of a context around this one, or nothing.
    """
    _ask_before_applying()
    token = _APPLY.set(apply or _APPLY.get() or (lambda value, *_: value))
    try:
        yield
    finally:
        _APPLY.reset(token)


@contextmanager
def unsharded_variables() -> Iterator[None]:
    """The same; variables that are made in it are not put anywhere later either."""
    from flax import nnx

    with names_alone(), nnx.use_eager_sharding(False):
        yield


#: What is done in the place of Flax's applying the names of a variable, in this thread or task.
_APPLY: ContextVar[Callable[..., Any] | None] = ContextVar("apply", default=None)


@functools.cache
def _ask_before_applying() -> None:
    from flax.core import meta, spmd
    from flax.linen.spmd import LogicallyPartitioned

    def asking(unbox: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(unbox)
        def asked(box: Any, apply_constraint: bool = True) -> Any:
            return unbox(box, apply_constraint and _APPLY.get() is None)

        return asked

    for kind in (meta.Partitioned, LogicallyPartitioned):
        kind.unbox = asking(kind.unbox)
    shard = spmd.shard_value

    @functools.wraps(shard)
    def sharded(value: Any, *how: Any) -> Any:
        return (_APPLY.get() or shard)(value, *how)

    spmd.shard_value = sharded


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[AnyJaxpr, Sequence[Value]]:
    """(equations, constants) of a jaxpr, closed or not.

    JAX 0.10 has `ClosedJaxpr` and `Jaxpr`; since 0.12 they are one class that has both `jaxpr` and
    `consts`.
    """
    return (jaxpr.jaxpr, tuple(jaxpr.consts)) if hasattr(jaxpr, "consts") else (jaxpr, ())


def scan_counts(params: EqnParams) -> tuple[int, int]:
    """The number of constant operands of a scan equation, and of carried ones; the rest is
    scanned over.

    JAX 0.10 says so in `num_consts` and `num_carry`, 0.12 in the structure `ft_in` of (constants,
    carry, scanned).
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def compiled_memory(compiled: jax.stages.Compiled, *, offloaded: bool = False) -> dict[str, int]:
    """Bytes per device of a compiled program: arguments, outputs, aliased, temporaries, peak.

    The peak that JAX 0.10.2 and 0.12 report for the CPU leaves the temporaries out; there the peak
    is the sum of the parts. That of programs with arguments or temporaries in host memory counts
    those; here it does not, where `offloaded` says that there are some, or the analysis does, or
    the shardings of the arguments do, which those of GPUs ahead of time do not.
    """
    import jax

    analysis: Any = compiled.memory_analysis()
    sizes = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
    }
    reported = getattr(analysis, "peak_memory_in_bytes", 0)
    whole = sizes["arguments"] + sizes["outputs"] - sizes["aliased"] + sizes["temporaries"]
    shardings = jax.tree.leaves(compiled.input_shardings)
    if (
        any(device.platform == "cpu" for sharding in shardings for device in sharding.device_set)
        or not reported
    ):
        return {**sizes, "peak": max(reported, whole)}
    spilled = bool(getattr(analysis, "host_temp_size_in_bytes", 0))
    if offloaded or spilled or any(sharding.memory_kind == "pinned_host" for sharding in shardings):
        host = (
            analysis.host_argument_size_in_bytes
            + analysis.host_output_size_in_bytes
            - analysis.host_alias_size_in_bytes
        )
        return {**sizes, "peak": min(reported - host, whole)}
    return {**sizes, "peak": reported}


#: The option under which JAX profiles the first steps; `jax.config` has no type for it.
_PROFILED = "jax_enable_pgle"


def runnable(
    function: Callable[..., Any],
    compiled: jax.stages.Compiled,
    arguments: Any,
    mesh: Mesh | AbstractMesh | None,
) -> Callable[..., Any]:
    """The executable of a compiled function.

    A `Compiled` of JAX 0.10 refuses arrays of fewer than 8 bits that have a sharding: it compares
    two descriptions of one layout. Called through `jax.jit`, the program that is compiled already
    runs; JAX 0.12 needs no detour. With `jax_enable_pgle` JAX profiles the first steps on a GPU and
    compiles again with what it saw, in both versions only through `jax.jit`.

    Args:
        mesh: that the function was lowered under; None for none.
    """
    import jax

    leaves = jax.tree.leaves(arguments)
    narrow = any(str(leaf.dtype) in SUB_BYTE for leaf in leaves)
    profiled: bool = getattr(jax.config, _PROFILED)
    if not profiled and (jax.__version_info__ >= (0, 12) or not narrow):
        return compiled

    def run(*values: Any) -> Any:
        with nullcontext() if mesh is None else in_mesh(mesh):
            return function(*values)

    return run


def in_mesh(mesh: Mesh | AbstractMesh) -> AbstractContextManager[object]:
    """A context in which a mesh is the current one: a mesh of devices, or an abstract mesh that has
    none (JAX 0.10 and 0.12 alike).
    """
    import jax

    return (
        jax.sharding.use_abstract_mesh(mesh)
        if isinstance(mesh, jax.sharding.AbstractMesh)
        else jax.set_mesh(mesh)
    )


def coordination() -> tuple[CoordinationClient, int, int] | None:
    """(client, number of this process, number of processes) of JAX's coordination service; None in
    a process that has not joined others (JAX 0.10 and 0.12 alike).

    The client has a store of keys and values and named barriers. JAX gives it no public name;
    `jax.experimental.multihost_utils` works with the same object.
    """
    from jax.experimental import multihost_utils

    state = multihost_utils.distributed.global_state
    return None if state.client is None else (state.client, state.process_id, state.num_processes)


def profile_events(
    profile: bytes,
) -> list[tuple[str, str, str, float, float, dict[str, str | int | float]]]:
    """(plane, line, name, start in ns, duration in ns, statistics) of every event in a profile
    (XSpace).

    In Python 3.12 and newer the reader warns of its own types (JAX 0.12), which aborts the process
    where warnings are errors.
    """
    import jax

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        data = jax.profiler.ProfileData.from_serialized_xspace(profile)
        return [
            (
                plane.name,
                line.name,
                event.name,
                event.start_ns,
                event.duration_ns,
                dict(event.stats),
            )
            for plane in data.planes
            for line in plane.lines
            for event in line.events
        ]
