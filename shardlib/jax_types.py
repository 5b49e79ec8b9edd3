"""Types of JAX's values, by the names that signatures use.

Type checkers alone look at what the names stand for: the classes of a traced program are in
`jax.extend.core`, and differ from one version of JAX to another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax
    import jax.core
    import jax.typing
    from jax.extend import core as jex

#: A value of a program while it is run: an array or a tracer. A literal that stands among them, a
#: scalar of Python or NumPy, is used as they are.
Value: TypeAlias = "jax.Array"
#: A whole number that is known, or computed by the program: int32 scalar.
Index: TypeAlias = "int | jax.Array"
#: What is known of a value before the program runs: shape, dtype, and mesh axes it varies over.
Aval: TypeAlias = "jax.core.ShapedArray"
#: A traced program, with its constants or without.
Jaxpr: TypeAlias = "jex.ClosedJaxpr | jex.Jaxpr"
#: One operation of a traced program; `shardlib.tracing.program.Equation` is the same with its
#: place.
Eqn: TypeAlias = "jex.JaxprEqn"
#: What an operation reads: a variable, or a literal.
Atom: TypeAlias = "jex.Var | jex.Literal"
#: The keys of `jax.tree_util` from the root of a pytree to a leaf; their classes are JAX's own.
KeyPath: TypeAlias = tuple[Any, ...]
#: Whatever names a dtype to JAX: "float32", `jnp.bfloat16`, `np.dtype`.
DType: TypeAlias = "jax.typing.DTypeLike"
#: What has a shape and a dtype: an array, a tracer, or the description of one.
Leaf: TypeAlias = "jax.Array | jax.ShapeDtypeStruct | jax.core.ShapedArray"
#: A constant of a traced program: an array, or a scalar of Python or NumPy.
Constant: TypeAlias = "jax.typing.ArrayLike"
#: A parameter of an operation; what it is, its primitive says.
EqnParam: TypeAlias = Any
#: Parameters of an operation, by name.
EqnParams: TypeAlias = dict[str, EqnParam]
#: A function that is passed on, wrapped or traced as it is; what it takes and gives, whoever wrote
#: it says.
Function: TypeAlias = Callable[..., Any]
#: What a loss reports beside its value, by name: scalars.
Metrics: TypeAlias = "dict[str, jax.Array]"
