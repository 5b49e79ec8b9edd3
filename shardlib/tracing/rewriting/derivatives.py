"""How is a custom derivative bound again, so that it knows nothing of other programs?

JAX keeps the jaxpr of a derivative's rule beside the equation, by which tangents are zero and by
nothing else (JAX 0.10.2 and 0.12). The equation of a function that is jitted, such as
`jax.nn.softplus`, is one object for all programs of a process, and a rule that is traced under a
mesh has that mesh in it: the second program would meet the mesh of the first. Here the flags that
say which tangents are zero know the mesh too, so that each mesh has a rule of its own.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import linear_util

from shardlib.jax_types import EqnParams

#: The parameters of custom derivatives (`jax.custom_jvp`, `jax.custom_vjp`) that make a rule's
#: jaxpr of flags.
RULES: tuple[str, ...] = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")


class Flag(int):
    """A flag that equals no flag of another mesh.

    Attributes:
        mesh: the mesh.
    """

    mesh: Any

    def __new__(cls, value: Any, mesh: Any) -> Flag:
        flag = super().__new__(cls, bool(value))
        flag.mesh = mesh
        return flag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flag) and int(self) == int(other) and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash((Flag, int(self), self.mesh))


def by_mesh(params: EqnParams) -> EqnParams:
    """The parameters of an equation; where it is a custom derivative, with a rule for each mesh."""
    return {name: _by_mesh(value) if name in RULES else value for name, value in params.items()}


def _by_mesh(rule: Any) -> Any:
    def made(*flags: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        return rule.call_wrapped(*(Flag(flag, mesh) for flag in flags))

    return linear_util.wrap_init(made, debug_info=rule.debug_info)
