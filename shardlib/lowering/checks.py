"""Checks before anything is lowered or run: plans that have no lowering, and states and batches of
other programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from shardlib.annotation.trees import Tree, path_text, static_difference
from shardlib.decisions.lowerings import facts_of_decisions, unsupported_on
from shardlib.decisions.lowerings import require as lowerings_require
from shardlib.errors import BatchError, PinError, PlanError, StateError, raise_all
from shardlib.functions.attention import Attention
from shardlib.functions.experts import ExpertForm
from shardlib.lowering.collectives import require_matmuls
from shardlib.lowering.disk import DiskArray
from shardlib.lowering.mesh import batch_path
from shardlib.lowering.random_keys import dtype_of
from shardlib.lowering.runtime import TrainState, require_not_donated
from shardlib.lowering.uses import LossFacts
from shardlib.planner.plan import Plan
from shardlib.tracing.program import has_matmul
from shardlib.untrusted.data import fit, printable

# --------------------------------------------------------------------------------------------------
# States of other programs. Checked after a call has failed, at no cost for successful steps.

#: Number of differences listed in an error.
MAX_LISTED = 3
#: Exceptions of a call with arrays that it was not compiled for.
CALL_ERRORS = (TypeError, ValueError, IndexError)
OWN_STATE = (
    "a state of this program, from program.init, program.step, or"
    " Checkpoints.restore(program), which adapts it to another plan or mesh"
)


def require_state(caller: str, state: object) -> None:
    """Raises if a value is not a state."""
    if not isinstance(state, TrainState):
        raise StateError(
            f"{caller} was given"
            f" {'None' if state is None else f'a value of type {type(state).__name__}'}, which is"
            " not a training state\nTry: state = program.init(seed=0), and then state, metrics ="
            " program.step(state, batch)"
        )


@contextmanager
def own_state(caller: str, state: Tree, expected: Tree) -> Iterator[None]:
    """Says of what a call raises for arrays that it was not compiled for which these are."""
    try:
        yield
    except CALL_ERRORS as error:
        require_own_state(caller, state, expected, error=error)
        raise


def require_own_state(
    caller: str,
    state: Tree,
    expected: Tree,
    *,
    error: Exception | None = None,
    layouts_too: bool = True,
) -> None:
    """Raises if a state does not belong to this program.

    Args:
        layouts_too: whether dtypes and shardings of arrays are compared too.
    """
    mismatches = _structure(state, expected) or _arrays(state, expected, layouts_too=layouts_too)
    resharded = [] if mismatches or not layouts_too else _layouts(state, expected)
    differences = mismatches or resharded
    if not differences:
        return
    can_be_resharded = (
        resharded
        and isinstance(state, TrainState)
        and not any(isinstance(leaf, DiskArray) for leaf in jax.tree.leaves(state))
    )
    hint = (
        "state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, program.state)),"
        " which lays it out as this program does"
        if can_be_resharded
        else OWN_STATE
    )
    more = [f"and {len(differences) - MAX_LISTED} more"] if len(differences) > MAX_LISTED else []
    try:
        raise_all(
            StateError,
            f"the state given to {caller} does not belong to this program",
            [*differences[:MAX_LISTED], *more],
            hint=hint,
        )
    except StateError as refused:
        raise refused from error


def _structure(state: Tree, expected: Tree) -> list[str]:
    """Arrays that are missing or unexpected, or else nodes of another kind."""
    wanted, present = (
        dict.fromkeys(path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))
        for tree in (expected, state)
    )
    paths = [f"{path} is not in it" for path in wanted if path not in present] + [
        f"{path} is in it, and not in the program's" for path in present if path not in wanted
    ]
    if paths or jax.tree.structure(state) == jax.tree.structure(expected):
        return paths
    structures = jax.tree.structure(state), jax.tree.structure(expected)
    return [static_difference(*structures) or "its parts without arrays are other objects"]


def _arrays(state: Tree, expected: Tree, *, layouts_too: bool) -> list[str]:
    """Arrays of another shape or dtype, in trees of equal structure."""

    def text(leaf: Any) -> str:
        return (
            f"{leaf.dtype if hasattr(leaf, 'dtype') else jnp.result_type(leaf)}"
            f"{list(np.shape(leaf))}"
            if layouts_too
            else str(list(np.shape(leaf)))
        )

    return [
        f"{path_text(path)} is {text(leaf)}, the program has {text(abstract)}"
        for (path, leaf), abstract in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
        )
        if text(leaf) != text(abstract)
    ]


def _layouts(state: Tree, expected: Tree) -> list[str]:
    """Arrays with another sharding."""
    return [
        f"{path_text(path)} is {_text(leaf.sharding, abstract.sharding)}, the program has"
        f" {_text(abstract.sharding, leaf.sharding)}"
        for (path, leaf), abstract in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
        )
        if _sharding_differs(leaf, abstract)
    ]


def _sharding_differs(leaf: Any, abstract: jax.ShapeDtypeStruct) -> bool:
    if isinstance(leaf, DiskArray):
        actual, expected = (
            sharding.with_memory_kind(None)  # pyright: ignore[reportArgumentType]
            for sharding in (leaf.sharding, abstract.sharding)
        )
        return not actual.is_equivalent_to(expected, len(abstract.shape))
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
        return False  # such arrays are moved by the call
    return not leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


def _text(sharding: Any, reference: Any) -> str:
    """A sharding described so that it is distinguished from another one."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    mesh = (
        " x ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items() if size > 1)
        or "one device"
    )
    text = f"{sharding.spec} over {mesh}"
    if sharding.memory_kind != reference.memory_kind:
        return f"{text} in {sharding.memory_kind}"
    if (
        isinstance(reference, NamedSharding)
        and isinstance(sharding.mesh, Mesh)
        and (sharding.spec, sharding.mesh.shape) == (reference.spec, reference.mesh.shape)
    ):
        return (
            f"{text}, devices {', '.join(str(device.id) for device in sharding.mesh.devices.flat)}"
        )
    return text


# --------------------------------------------------------------------------------------------------
# Batches other than the one that a program was compiled for.

#: Number of names listed in a message, for each kind.
MAX_NAMES = 20
#: First words of messages.
OTHER_BATCH = "the batch is not the one that the program was compiled for"


def require_batch(batch: Tree, compiled: Tree) -> None:
    """Raises if a batch does not match the one that a program was compiled for."""
    expected, structure = jax.tree_util.tree_flatten_with_path(compiled)
    if jax.tree.structure(batch) != structure:
        _refuse(batch, compiled)
    failures = [
        f"{batch_path(path)}: found {mismatch}, compiled for {abstract.dtype}{list(abstract.shape)}"
        for (path, abstract), leaf in zip(expected, jax.tree.leaves(batch), strict=True)
        if (mismatch := _mismatch(leaf, abstract))
    ]
    if failures:
        hint = "compile again for these shapes, or pad the batch"
        raise_all(BatchError, OTHER_BATCH, failures, hint=hint)


def _refuse(batch: Tree, compiled: Tree) -> None:
    """Raises with the arrays that are missing and those that are unexpected."""
    present, expected = _named(batch), _named(compiled)
    failures = [
        f"{name} is missing, {leaf.dtype}{list(leaf.shape)}"
        for name, leaf in expected.items()
        if name not in present
    ]
    failures += [f"{name} is unexpected" for name in present if name not in expected]
    if not failures:
        failures = [f"it is {_containers(batch)}, compiled for {_containers(compiled)}"]
    more = len(failures) - MAX_NAMES
    raise_all(
        BatchError,
        OTHER_BATCH,
        [*failures[:MAX_NAMES], *([f"{more:,} more"] if more > 0 else [])],
        hint="give the step the arrays that the program was compiled for, or compile again for"
        " these",
    )


def _named(batch: Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch by the names that errors give them."""
    return {
        fit(printable(batch_path(path)), 200): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]
    }


def _containers(batch: Tree) -> str:
    """The containers of a batch, with stars for its arrays."""
    text = str(jax.tree.structure(batch)).removeprefix("PyTreeDef(").removesuffix(")")
    return fit(printable(text), 300)


def _mismatch(leaf: Any, abstract: jax.ShapeDtypeStruct) -> str:
    """A leaf that does not match, described; 64-bit host numbers count as what JAX converts them
    to.
    """
    shape = tuple(np.shape(leaf))
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if shape == tuple(abstract.shape) and dtype_of(leaf) == abstract.dtype:
        return ""
    return f"{dtype}{list(shape)}"


# --------------------------------------------------------------------------------------------------
# Plans without a lowering, for a loss or for any; rejected before anything is compiled.


def require_lowered(plan: Plan) -> None:
    """Raises if a plan cannot be lowered for any loss or chip."""
    what = "the plan asks for what has no lowering"
    lowerings_require(facts_of_decisions(plan), what, unsupported_on(vendor=""))
    require_matmuls(plan)


def require_functions(plan: Plan, loss: LossFacts, *, layouts_lost: bool) -> None:
    """Raises if a loss does not have the functions for which the plan has decisions."""
    forms = [site.call.form for site in loss.calls.values()]
    exchanges_sequence = plan.context in ("ring", "ulysses")
    exchanges_tokens = plan.experts != "none"
    if "activations" in plan.offload and not any(
        equation.name == "scan" and has_matmul(equation.eqn) for equation in loss.program.equations
    ):
        raise PinError(
            f"activations in host memory need layers under a scan, and the loss of {plan.model} has"
            " none\nTry: nnx.scan or jax.lax.scan over the layers, or no offload of activations"
        )
    if exchanges_sequence and not any(isinstance(form, Attention) for form in forms):
        raise PinError(
            f"context={plan.context!r} needs attention that is called as a function, and the loss"
            f" of {plan.model} has none\nTry: shardlib.attention(query, key, value) in the model,"
            " or context='all-gather'"
        )
    if exchanges_tokens and not any(isinstance(form, ExpertForm) for form in forms):
        raise PinError(
            f"experts={plan.experts!r} needs experts that are called as a function, and the loss of"
            f" {plan.model} has none\nTry: shardlib.functions.experts.visit(x, weights, chosen, up,"
            " down, gate) in the model, or experts='none'"
        )
    if layouts_lost and (exchanges_sequence or exchanges_tokens):
        raise PlanError(
            "sharded attention and expert parallelism need the layouts of the loss as it was"
            " planned, and the loss computes different operations on a microbatch than on the whole"
            " batch\nTry: pin microbatches to 1"
        )


def require_model(caller: str, state: TrainState, expected: TrainState) -> None:
    """Raises if the parameters or model state of a state are deleted or have other shapes."""
    require_state(caller, state)
    require_not_donated(caller, state.inference)
    require_own_state(caller, state.inference, expected.inference, layouts_too=False)
