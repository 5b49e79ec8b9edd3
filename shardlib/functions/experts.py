"""Mixtures of experts; vendors' attention kernels; axes of `jax.pmap`.

In the dropless form (MegaBlocks, arXiv:2211.15841) assignments of tokens to experts are sorted by
expert and multiplied with `jax.lax.ragged_dot`: every token reaches all its experts, and the FLOPs
are those of the chosen experts. In the capacity form (GShard, arXiv:2006.16668; Switch,
arXiv:2101.03961) an expert takes at most c T k / E of T tokens that choose k of E experts, all
first choices in the order of the tokens before all second ones; further assignments are dropped
(they contribute zero) and counted.

>>> ExpertForm(gated=False, capacity=1.25).slots(tokens=64, per_token=2, experts=8)
20

Programs of `jax.pmap`: the mapped axis is bound to the whole batch.

Such a program computes on the rows of one device and averages over devices by name,
`lax.pmean(gradients, "batch")`. On the whole batch the axis has one member: a mean or a sum over it
is its operand (which is over all rows already), its size is 1, its index 0.

>>> import jax
>>> step = whole_batch(lambda x: 2.0 * jax.lax.pmean(x, "batch"), ("batch",))
>>> step(3.0)
Array(6., dtype=float32)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib._jax_compat import AnyJaxpr, open_jaxpr
from shardlib.cost.experts import CAPACITY_SCOPE
from shardlib.errors import ModelError, TracingError, raise_all
from shardlib.findings import Finding
from shardlib.functions.attention import Attention, Operand, Operands, marked
from shardlib.graph import Kind
from shardlib.jax_types import Eqn, EqnParams, Function

#: Collectives that return their operand over an axis with one member.
_SAME = frozenset({"psum", "psum_invariant", "pmax", "pmin", "pvary", "pbroadcast", "all_to_all"})
#: JAX's message for an unbound axis name.
_UNBOUND = re.compile(r"unbound axis name: ?(\w+)")
_BOUND: ContextVar[tuple[str, ...]] = ContextVar("bound", default=())


def bound_axes() -> tuple[str, ...]:
    """The axes bound to the whole batch in the current trace."""
    return _BOUND.get()


def unbound_axis(error: Exception) -> str:
    """The name of the axis that a trace found unbound; "" for other errors."""
    match = _UNBOUND.search(str(error)) if isinstance(error, NameError) else None
    return match[1] if match else ""


def found_axes(trace: Callable[[tuple[str, ...]], Any]) -> Any:
    """The result of `trace`, called again with every axis name bound that it turns out to use.

    Args:
        trace: names of axes to bind -> any result.
    """
    names: tuple[str, ...] = ()
    while True:
        try:
            return trace(names)
        except NameError as error:
            name = unbound_axis(error)
            if not name or name in names:
                raise
            names = (*names, name)


def mapped_finding(names: Sequence[str]) -> tuple[Finding, ...]:
    """A finding about the bound axes, if any."""
    if not names:
        return ()
    return (
        Finding(
            code="mapped-axis",
            severity="info",
            where=", ".join(names),
            message=(
                f"the axis {', '.join(names)} of jax.pmap is bound to the whole batch: means and"
                " sums over it are those of all rows, its size is 1 and its index 0"
            ),
            hint="whole batches and one state: no jax_utils.replicate, no common_utils.shard",
        ),
    )


def whole_batch(function: Function, names: Sequence[str]) -> Function:
    """A function with axes of `jax.pmap` bound to the whole batch."""
    if not names:
        return function

    def bound(*args: Any) -> Any:
        with _binding(names):
            closed, out = jax.make_jaxpr(
                function, axis_env=[(name, 1) for name in names], return_shape=True
            )(*args)
        inner, constants = open_jaxpr(closed)
        alone = jex.ClosedJaxpr(of_one_member(inner, names), list(constants))
        results = jex.jaxpr_as_fun(alone)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return bound


@contextmanager
def _binding(names: Sequence[str]) -> Iterator[None]:
    token = _BOUND.set((*_BOUND.get(), *names))
    try:
        yield
    finally:
        _BOUND.reset(token)


def of_one_member(jaxpr: AnyJaxpr, names: Collection[str]) -> AnyJaxpr:
    """A jaxpr with the collectives over some axes replaced by their meaning for one member."""
    if not names:
        return jaxpr
    replaced: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, jex.Literal) else replaced.get(atom, atom)

    equations: list[Any] = []
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(
            invars=[read(atom) for atom in eqn.invars],
            params={key: _inside(value, names) for key, value in eqn.params.items()},
            effects=_effects(eqn.effects, names),
        )
        axes = _axes(eqn.params)
        if not axes or not set(axes) <= set(names):
            equations.append(eqn)
            continue
        body, _ = open_jaxpr(jax.make_jaxpr(_meaning(eqn))(*(atom.aval for atom in eqn.invars)))
        inner = dict(zip(body.invars, eqn.invars, strict=True))

        def taken(atom: Any, inner: dict[Any, Any] = inner) -> Any:
            return atom if isinstance(atom, jex.Literal) else inner.get(atom, atom)

        equations += [
            equation.replace(invars=[taken(atom) for atom in equation.invars])
            for equation in body.eqns
        ]
        replaced.update(zip(eqn.outvars, map(taken, body.outvars), strict=True))
    return jaxpr.replace(
        eqns=equations,
        outvars=[read(atom) for atom in jaxpr.outvars],
        effects=_effects(jaxpr.effects, names),
    )


def _inside(value: Any, names: Collection[str]) -> Any:
    """A parameter of an equation, with the same applied to the jaxprs in it."""
    if isinstance(value, (tuple, list)) and any(hasattr(item, "eqns") for item in value):
        return type(value)(_inside(item, names) for item in value)
    if not hasattr(value, "eqns"):
        return value
    if not hasattr(value, "consts"):
        return of_one_member(value, names)
    inner, constants = open_jaxpr(value)
    return jex.ClosedJaxpr(of_one_member(inner, names), list(constants))


def _axes(params: EqnParams) -> tuple[Any, ...]:
    """The named axes of a collective; () for other equations."""
    named_axes = params.get("axes", params.get("axis_name", ()))
    axes = named_axes if isinstance(named_axes, (tuple, list)) else (named_axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _effects(effects: Any, names: Collection[str]) -> Any:
    return type(effects)(effect for effect in effects if getattr(effect, "name", None) not in names)


def _meaning(eqn: Eqn) -> Callable[..., Any]:
    """The computation of a collective whose axis has one member."""
    name, params = eqn.primitive.name, eqn.params
    if name in _SAME or (name != "axis_index" and params.get("tiled")):
        return lambda *arrays: arrays
    if name == "axis_index":
        return lambda: jnp.int32(0)
    if name == "all_gather":
        return lambda array: jnp.expand_dims(array, params["all_gather_dimension"])
    if name == "reduce_scatter":
        return lambda array: jnp.squeeze(array, params["scatter_dimension"])
    if name == "ppermute":
        from_itself = (0, 0) in {tuple(pair) for pair in params["perm"]}
        return lambda *arrays: arrays if from_itself else tuple(map(jnp.zeros_like, arrays))
    raise TracingError(
        f"{name} over the axis {', '.join(_axes(params))} of jax.pmap has no meaning on the whole"
        " batch\nTry: without jax.pmap, the same computed of all rows"
    )


# --------------------------------------------------------------------------------------------------
# Vendors' kernels for a call of attention.
#
# On TPUs splash attention, which comes with JAX (fully masked blocks are skipped; documents are
# handled in the kernel), on NVIDIA GPUs that of cuDNN. Neither materialises scores
# (FlashAttention, arXiv:2205.14135). "blocks" is an XLA program that supports all options on any
# machine, and materialises the scores of one block.

#: Lanes of a TPU's vector unit: splash attention needs blocks of a multiple of them.
LANES = 128
#: Head widths in cuDNN's kernel must be a multiple of this; the maximum is a property of the chip
#: (`shardlib.machines.chips.Chip.attention_width`).
CUDNN_STEP = 8


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Features that a kernel must support.

    Attributes:
        queries, keys: number of positions.
        width: head width of queries and keys, elements.
        value_width: head width of values; if the two differ, the narrower ones are padded with
            zeros for cuDNN's kernel, since `jax.nn.dot_product_attention` has one width for all.
        dtype: of queries.
        window: keys that a query attends to; 0 for all, None if known only at run time.
        capped: whether there is a softcap.
        documents: whether there are several documents.
        biased: whether there is a bias by distance.
    """

    queries: int
    keys: int
    width: int
    value_width: int
    dtype: Any
    causal: bool
    window: int | None
    capped: bool
    documents: bool
    biased: bool = False

    @staticmethod
    def by(form: Attention, arrays: Sequence[Operand]) -> Wanted:
        """The features of a call, from its (abstract) operands. If the window is enabled only at
        run time, two kernels are needed.
        """
        operands = Operands.of(form, arrays)
        return Wanted(
            queries=operands.queries[0].shape[1],
            keys=operands.value.shape[1],
            width=sum(query.shape[3] for query in operands.queries),
            value_width=operands.value.shape[3],
            dtype=operands.queries[0].dtype,
            causal=form.causal,
            window=form.window,
            capped=bool(form.softcap),
            documents=form.packed,
            biased=form.bias is not None,
        )

    @property
    def widest(self) -> int:
        """The wider of the two head widths."""
        return max(self.width, self.value_width)

    def why_not(self, kind: Kind) -> str:
        """The reason why a kernel does not support the call; "" if it does, on chips that support
        the head width.
        """
        if kind == "blocks":
            return ""
        if self.biased:
            return "distances add to scores, for which the kernel has no form"
        if self.window is None:
            return "the window is known only when the program runs"
        if self.queries != self.keys and (self.causal or self.window):
            return f"{self.queries} queries do not stand where {self.keys} keys do"
        if kind == "splash":
            odd = [length for length in (self.queries, self.keys) if length % LANES]
            return f"a sequence of {odd[0]} is not a multiple of {LANES}" if odd else ""
        wrong = {
            f"the kernel is for bfloat16 and float16, not for {jnp.dtype(self.dtype)}": (
                jnp.dtype(self.dtype) not in (jnp.bfloat16, jnp.float16)
            ),
            f"heads are {self.widest} wide: no multiple of {CUDNN_STEP}": (
                self.widest % CUDNN_STEP != 0
            ),
            "scores are capped": self.capped,
            "there are several documents": self.documents,
            "the window is to both sides": bool(self.window) and not self.causal,
        }
        return next((why for why, is_so in wrong.items() if is_so), "")


# --------------------------------------------------------------------------------------------------
# Activations by the names that configurations use.

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """The computation of experts.

    Attributes:
        activation: a name of `ACTIVATIONS`.
        gated: whether experts are down(activation(gate(x)) * up(x)) rather than
            down(activation(up(x))).
        capacity: factor c on the mean load, the most an expert takes; None for dropless.

    Raises:
        ModelError: an unknown activation, or a capacity that is not positive.
    """

    activation: str = "silu"
    gated: bool = True
    capacity: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ModelError(
                f"activation {self.activation!r} of experts is not known\nTry: one of"
                f" {', '.join(ACTIVATIONS)}"
            )
        if self.capacity is not None and not (self.capacity > 0 and math.isfinite(self.capacity)):
            raise ModelError(
                f"capacity {self.capacity} of experts is not positive\nTry: a factor over the mean"
                " load, 1.25 for example, or None to drop nothing"
            )

    @property
    def kind(self) -> str:
        """The name of the custom call in plans."""
        return "dropless" if self.capacity is None else "capacity"

    def activated(self, hidden: jax.Array, gate: jax.Array | None) -> jax.Array:
        """The operand of the second matmul of an expert.

        Args:
            hidden: result of the first matmul, [..., F].
            gate: that of the gate, [..., F].
        """
        act = ACTIVATIONS[self.activation]
        return act(hidden) if gate is None else act(gate) * hidden

    @property
    def scope(self) -> str:
        """The name scope by which pricing recognises its operations; "" for none."""
        return "" if self.capacity is None else CAPACITY_SCOPE

    def slots(self, *, tokens: int, per_token: int, experts: int) -> int:
        """Maximum number of tokens that one expert takes."""
        if self.capacity is None:
            return tokens * per_token
        # Decimal products may be slightly above an integer.
        return math.ceil(self.capacity * tokens * per_token / experts - 1e-9)


def visit(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
    *,
    activation: str = "silu",
    capacity: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sends every token to its chosen experts and adds up their weighted results.

    Args:
        x: tokens [..., D].
        weights: weights of the chosen experts, [..., K].
        chosen: numbers of the chosen experts, int [..., K].
        up: [E, D, F]; all parameters are cast to the dtype of `x`.
        down: [E, F, D].
        gate: [E, D, F]; None for experts without a gate.
        activation: a name of `ACTIVATIONS`.
        capacity: factor on the mean load, the most an expert takes; None for dropless.

    Returns:
        Results [..., D], and the number of dropped assignments, int32 [].

    Raises:
        ModelError: shapes that do not fit, more choices than experts, an unknown activation, or a
            capacity that is not positive.
    """
    form = ExpertForm(activation=activation, gated=gate is not None, capacity=capacity)
    _check(x, weights, chosen, up, down, gate)
    return marked(form, visited)(x, weights, chosen, up, down, *(() if gate is None else (gate,)))


def visited(form: ExpertForm, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Experts on one device, for the arrays of a custom call: x, weights, chosen, up, down, and
    gate if gated; see `visit`.
    """
    x, weights, chosen, *parameters = arrays
    per_token = chosen.shape[-1]
    tokens = x.reshape(-1, x.shape[-1])
    token_weights = weights.reshape(-1, per_token)
    numbers = chosen.reshape(-1, per_token)
    used = [array.astype(x.dtype) for array in parameters]
    if form.capacity is None:
        home, dropped = _dropless(form, tokens, numbers, *used)
    else:
        with jax.named_scope(form.scope):
            home, dropped = _capped(form, tokens, numbers, *used)
    return jnp.einsum("nk,nkd->nd", token_weights.astype(home.dtype), home).reshape(
        x.shape
    ), dropped


def _dropless(
    form: ExpertForm,
    tokens: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results [N, K, D] of the experts, by sorting the assignments."""
    sizes = jnp.bincount(chosen.reshape(-1), length=up.shape[0]).astype(jnp.int32)
    order = jnp.argsort(chosen.reshape(-1))
    rows = jnp.take(tokens, order // chosen.shape[-1], axis=0, mode="clip")
    hidden = form.activated(
        jax.lax.ragged_dot(rows, up, sizes),
        None if gate is None else jax.lax.ragged_dot(rows, gate, sizes),
    )
    results = jax.lax.ragged_dot(hidden, down, sizes)
    return jnp.take(results, jnp.argsort(order), axis=0, mode="clip").reshape(
        *chosen.shape, -1
    ), jnp.zeros((), jnp.int32)


def _capped(
    form: ExpertForm,
    tokens: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Results [N, K, D] of the experts, zeros for dropped assignments; each expert has one slot per
    assignment that it takes.
    """
    count, (number, per_token) = up.shape[0], chosen.shape
    slots = form.slots(tokens=number, per_token=per_token, experts=count)
    # All first choices in the order of the tokens, then all second ones.
    queue = chosen.T.reshape(-1)
    order = jnp.argsort(queue)
    starts = jnp.searchsorted(jnp.take(queue, order), jnp.arange(count + 1))
    position = jnp.argsort(order) - jnp.take(starts, queue)
    place = starts[:-1, None] + jnp.arange(slots)
    taken = place < starts[1:, None]
    rows = jnp.where(
        taken[..., None],
        jnp.take(tokens, jnp.take(order, place, mode="clip") % number, axis=0, mode="clip"),
        0,
    )
    hidden = form.activated(
        jnp.einsum("ecd,edf->ecf", rows, up),
        None if gate is None else jnp.einsum("ecd,edf->ecf", rows, gate),
    )
    results = jnp.einsum("ecf,efd->ecd", hidden, down).reshape(count * slots, -1)
    accepted = position < slots
    home = jnp.where(
        accepted[:, None],
        jnp.take(results, queue * slots + jnp.minimum(position, slots - 1), axis=0, mode="clip"),
        0,
    )
    return home.reshape(per_token, number, -1).swapaxes(0, 1), jnp.sum(~accepted, dtype=jnp.int32)


def _check(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    up: jax.Array,
    down: jax.Array,
    gate: jax.Array | None,
) -> None:
    failures = [
        f"{name} is {array.shape}; it has three dims"
        for name, array in (("up", up), ("down", down))
        if array.ndim != 3
    ]
    if failures or not (x.ndim and chosen.ndim):
        raise_all(
            ModelError,
            "experts do not fit",
            failures or ["x and chosen have a dim of features and one of choices"],
        )
    count, width, inner = up.shape
    shapes = {
        "x": (x.shape, (*x.shape[:-1], width)),
        "chosen": (chosen.shape, (*x.shape[:-1], chosen.shape[-1])),
        "weights": (weights.shape, chosen.shape),
        "down": (down.shape, (count, inner, width)),
        **({} if gate is None else {"gate": (gate.shape, up.shape)}),
    }
    failures = [
        f"{name} is {actual}; with up {up.shape} and x {x.shape} it must be {right}"
        for name, (actual, right) in shapes.items()
        if actual != right
    ]
    if chosen.shape[-1] > count:
        failures.append(f"a token cannot visit {chosen.shape[-1]} of {count} experts")
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        failures.append(f"chosen is {chosen.dtype}; it holds numbers of experts")
    if failures:
        raise_all(ModelError, "experts do not fit", failures)
