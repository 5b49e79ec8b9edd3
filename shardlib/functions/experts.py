"""Mixtures of experts: tokens visit the experts that they chose; vendors' kernels and axes of
`jax.pmap`.

In the dropless form (MegaBlocks, arXiv:2211.15841) assignments of tokens to experts are sorted by
expert and multiplied with `jax.lax.ragged_dot`: every token visits all the experts that it chose,
and the FLOPs are those of the chosen experts, no more. In the capacity form (GShard,
arXiv:2006.16668; Switch, arXiv:2101.03961) an expert takes at most c T k / E of T tokens that
choose k of E experts, all first choices in the order of the tokens before all second ones; the rest
is dropped, which means that it adds nothing, and counted.

>>> ExpertForm(gated=False, capacity=1.25).slots(tokens=64, per_token=2, experts=8)
20

Programs of `jax.pmap`: the axis that they are mapped over is bound to the whole batch.

Such a program computes on the rows of one device and averages with the others by name,
`lax.pmean(gradients, "batch")`. On the whole batch there is one member: a mean over the axis is
what it is given, and so is a sum, which is over all rows already; its size is 1, its index 0.

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
from shardlib.cost.experts import CAPPED
from shardlib.errors import ModelError, TracingError, raise_all
from shardlib.findings import Finding
from shardlib.functions.attention import Attention, Operand, Operands, marked
from shardlib.graph import Kind
from shardlib.jax_types import Eqn, EqnParams, Function

#: Collectives that give what they are given where the axis has one member.
_SAME = frozenset({"psum", "psum_invariant", "pmax", "pmin", "pvary", "pbroadcast", "all_to_all"})
#: How JAX says that no axis has a name.
_UNBOUND = re.compile(r"unbound axis name: ?(\w+)")
_BOUND: ContextVar[tuple[str, ...]] = ContextVar("bound", default=())


def bound_axes() -> tuple[str, ...]:
    """The axes that are bound to the whole batch in the trace that is made now."""
    return _BOUND.get()


def unbound_axis(error: Exception) -> str:
    """The name of the axis that a trace has asked for and that nothing binds; "" for other
    errors.
    """
    match = _UNBOUND.search(str(error)) if isinstance(error, NameError) else None
    return match[1] if match else ""


def found_axes(trace: Callable[[tuple[str, ...]], Any]) -> Any:
    """Returns what a trace gives, with the axes bound that it asks for.

    Args:
        trace: names of axes to bind -> anything.
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
    """Returns what the user should know of axes that were bound."""
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
    """A jaxpr without the collectives over some axes, which have one member."""
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
    """A parameter of an equation, with the jaxprs in it."""
    if isinstance(value, (tuple, list)) and any(hasattr(item, "eqns") for item in value):
        return type(value)(_inside(item, names) for item in value)
    if not hasattr(value, "eqns"):
        return value
    if not hasattr(value, "consts"):
        return of_one_member(value, names)
    inner, constants = open_jaxpr(value)
    return jex.ClosedJaxpr(of_one_member(inner, names), list(constants))


def _axes(params: EqnParams) -> tuple[Any, ...]:
    """The named axes of a collective; none of other equations."""
    named_axes = params.get("axes", params.get("axis_name", ()))
    axes = named_axes if isinstance(named_axes, (tuple, list)) else (named_axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _effects(effects: Any, names: Collection[str]) -> Any:
    return type(effects)(effect for effect in effects if getattr(effect, "name", None) not in names)


def _meaning(eqn: Eqn) -> Callable[..., Any]:
    """Returns what a collective computes where its axis has one member."""
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
# Kernels of the vendors that compute a call of attention.
#
# On TPUs splash attention, which comes with JAX (blocks of the mask that nobody sees are left out;
# documents are told in the kernel), on NVIDIA GPUs that of cuDNN. Neither holds scores
# (FlashAttention, arXiv:2205.14135). "blocks" is a program of XLA that does all that can be asked
# for, on any machine, and holds the scores of one block.

#: Lanes of a TPU's vector unit: splash attention wants blocks of a multiple.
LANES = 128
#: What widths of heads of cuDNN's kernel are multiples of; how wide they may be is a figure of the
#: chip (`shardlib.machines.chips.Chip.attention_width`).
CUDNN_STEP = 8


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Features that a kernel must have.

    Attributes:
        queries, keys: positions of both.
        width: of the heads of queries and keys, elements.
        value_width: of the heads of values; where the two differ the narrower ones are padded with
            zeros for cuDNN's kernel, as `jax.nn.dot_product_attention` has one width for all.
        dtype: of queries.
        causal: whether a query sees no later key.
        window: keys that a query sees; 0 for all, None where that is known only when the program
            runs.
        capped: whether scores are capped.
        documents: whether there are several.
        biased: whether distances add to scores.
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
        """Returns what a call asks for, by its operands or their abstract values. Whether a window
        counts may be known only later: there are two kernels then.
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
        """The wider of both widths."""
        return max(self.width, self.value_width)

    def why_not(self, kind: Kind) -> str:
        """Returns why a kernel cannot compute it; empty where it can, on chips that take heads of
        the width.
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
        gated: whether experts are down(activation(gate(x)) * up(x)), and not
            down(activation(up(x))).
        capacity: None drops nothing; else the factor c over the mean load that an expert takes.

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
        """The name of the custom call in planning."""
        return "dropless" if self.capacity is None else "capacity"

    def activated(self, hidden: jax.Array, gate: jax.Array | None) -> jax.Array:
        """Returns what the second matmul of an expert reads.

        Args:
            hidden: result of the first matmul, [..., F].
            gate: that of the gate, [..., F]; None where experts have none.
        """
        act = ACTIVATIONS[self.activation]
        return act(hidden) if gate is None else act(gate) * hidden

    @property
    def scope(self) -> str:
        """Returns what pricing knows its operations by; empty where it needs no name."""
        return "" if self.capacity is None else CAPPED

    def slots(self, *, tokens: int, per_token: int, experts: int) -> int:
        """Tokens that one expert takes at most."""
        if self.capacity is None:
            return tokens * per_token
        # Products of decimals may end a little above a whole number.
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
    """Sends every token to the experts that it chose and adds up their weighted results.

    Args:
        x: tokens [..., D].
        weights: of the chosen experts, [..., K].
        chosen: numbers of experts, int [..., K].
        up: [E, D, F]; all parameters are cast to the dtype of `x`.
        down: [E, F, D].
        gate: [E, D, F]; None where experts have no gate.
        activation: a name of `ACTIVATIONS`.
        capacity: factor over the mean load that an expert takes at most; None drops nothing.

    Returns:
        Results [..., D], and the number of assignments that were dropped, int32 [].

    Raises:
        ModelError: shapes that do not fit, more choices than experts, an unknown activation, or a
            capacity that is not positive.
    """
    form = ExpertForm(activation=activation, gated=gate is not None, capacity=capacity)
    _check(x, weights, chosen, up, down, gate)
    return marked(form, visited)(x, weights, chosen, up, down, *(() if gate is None else (gate,)))


def visited(form: ExpertForm, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what one device computes, for the arrays of a custom call: x, weights, chosen, up,
    down, and gate where the form is gated; see `visit`.
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
    """Results [N, K, D] of the experts, zeros where an assignment is dropped, from a slot for every
    assignment that an expert takes.
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
