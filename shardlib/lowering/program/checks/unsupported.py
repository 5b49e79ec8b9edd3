"""What cannot be lowered? A plan, or a plan for a certain loss, is refused before anything is made
of it.
"""

from __future__ import annotations

from shardlib.decisions.lowerings import facts, on_chips, require
from shardlib.errors import PinError, PlanError
from shardlib.functions.attention import Attention
from shardlib.functions.experts import ExpertForm
from shardlib.lowering.mesh.precision import require_products
from shardlib.lowering.reading.loss import LossReading
from shardlib.planning.plan import Plan
from shardlib.tracing.program import has_matmul


def require_lowered(plan: Plan) -> None:
    """Raises where no program can be made of a plan, whatever the loss and on all chips."""
    require(facts(plan), "the plan decides for what has no lowering", on_chips(vendor=""))
    require_products(plan)


def require_functions(plan: Plan, loss: LossReading, *, lost: bool) -> None:
    """Raises where the loss has not what a plan decides about."""
    forms = [site.call.form for site in loss.calls.values()]
    along, routed = plan.context in ("ring", "ulysses"), plan.experts != "none"
    if "activations" in plan.offload and not any(
        equation.name == "scan" and has_matmul(equation.eqn) for equation in loss.program.equations
    ):
        raise PinError(
            f"activations in host memory need layers under a scan, and the loss of {plan.model} has"
            " none\nTry: nnx.scan or jax.lax.scan over the layers, or no offload of activations"
        )
    if along and not any(isinstance(form, Attention) for form in forms):
        raise PinError(
            f"context={plan.context!r} needs attention that is called as a function, and the loss"
            f" of {plan.model} has none\nTry: shardlib.attention(query, key, value) in the model,"
            " or context='all-gather'"
        )
    if routed and not any(isinstance(form, ExpertForm) for form in forms):
        raise PinError(
            f"experts={plan.experts!r} needs experts that are called as a function, and the loss of"
            f" {plan.model} has none\nTry: shardlib.functions.experts.visit(x, weights, chosen, up,"
            " down, gate) in the model, or experts='none'"
        )
    if lost and (along or routed):
        raise PlanError(
            "attention and experts on their devices need the layouts of the loss as it was planned,"
            " and the loss computes other operations on a microbatch than on the whole batch\nTry:"
            " pin microbatches to 1"
        )
