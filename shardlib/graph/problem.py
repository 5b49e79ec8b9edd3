"""What is to be planned: everything the search needs to know about a model, with no JAX in it.

Tracing makes a `Problem` once; searching, pricing and explaining read it. The costs come from *step
graphs*: what one call of value-and-gradient computes, forward and backward, one graph per remat
policy, with repeated layers folded into loops. The names and layouts come from the *forward graph*,
which is the user's loss as written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.axes import LogicalAxes
from shardlib.compact import compact
from shardlib.graph.graph import Graph
from shardlib.graph.rows import Dependence, Rows

#: What paths of model state begin with.
STATE = "state"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """An array of the model: trained, or frozen, or state that the loss updates.

    Attributes:
        path: tree path, "layers.mlp.up.kernel"; that of state begins with `STATE`.
        shape: elements per dim.
        dtype: stored dtype.
        axes: the user's logical axis per dim; None where unnamed.
        state_bytes_per_element: bytes of optimizer state per element that have the parameter's
            shape (8 for Adam in float32).
        state_arrays: how many arrays of optimizer state have the parameter's shape; 0 where nobody
            counted them.
        role: "trained"; "frozen" for what no step changes; "updated" for model state that the loss
            itself changes. Only what is trained has a gradient and optimizer state.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: LogicalAxes
    state_bytes_per_element: float = 0.0
    state_arrays: int = 0
    role: str = "trained"

    @property
    def trained(self) -> bool:
        """Whether it has a gradient and optimizer state."""
        return self.role == "trained"


@dataclass(frozen=True, kw_only=True)
class InputDim:
    """Ties an input of a step graph to the parameters or batch arrays it was made of.

    Attributes:
        paths: tree paths of the arrays behind this input; several when layers written out one by
            one were stacked.
        stacked: whether the input has an extra leading dim over `paths`.
    """

    paths: tuple[str, ...]
    stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """What one value-and-gradient of the loss computes under one remat policy.

    Attributes:
        graph: forward and backward ops; its inputs follow `inputs`. Its outputs are the loss and
            other results first, then one gradient for each parameter input, in the order of the
            parameter inputs.
        inputs: for each input of the graph, which arrays it stands for.
        gradients: value index of the gradient for each input that is a parameter, in order of the
            inputs.
    """

    graph: Graph
    inputs: tuple[InputDim, ...]
    gradients: tuple[int, ...]

    __repr__ = compact


@dataclass(frozen=True, kw_only=True)
class AttentionCalls:
    """What the calls of attention of a loss ask of kernels.

    Attributes:
        without: for each kernel (`shardlib.graph.kernels`) that cannot compute some call, why not.
        width: of the widest head, elements; 0 without any call.
    """

    without: tuple[tuple[str, str], ...] = ()
    width: int = 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its loss and its batch, ready to be planned.

    Attributes:
        model: a name for people.
        forward: the loss as written; its inputs are parameters, then model state, then batch.
        steps: step graph per remat policy name ("none", "full", ...).
        parameters: every array that is trained or frozen, in tree order; then floating-point state
            that the loss updates.
        batch: (path, shape, dtype, logical axes) of every batch array; sizes are global.
        state_bytes: bytes of other model state (replicated).
        tokens: tokens in the global batch.
        compute_dtype: dtype of the matmuls that dominate.
        functions: kinds of custom calls that the loss calls (`shardlib.functions`):
            "attention", "dropless", "capacity".
        rows: how the loss depends on the rows of the batch.
        attention: what kernels of attention must do for it.
        pieces: (value, dim) of the forward graph that are several things side by side
            (`shardlib.propagation.pieces`) -> the size of each.
    """

    model: str
    forward: Graph
    steps: Mapping[str, StepGraph]
    parameters: tuple[Parameter, ...]
    batch: tuple[tuple[str, tuple[int, ...], str, LogicalAxes], ...]
    state_bytes: int = 0
    tokens: int = 0
    compute_dtype: str = "float32"
    functions: frozenset[str] = frozenset()
    attention: AttentionCalls = AttentionCalls()
    rows: Rows = field(default_factory=lambda: Rows(loss=Dependence(kind="mean"), asserted=True))
    pieces: Mapping[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[int, ...]]
    )

    __repr__ = compact
