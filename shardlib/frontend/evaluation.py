"""The loss of evaluations where the user names none: that of the step, with a finding where a step
does what an evaluation should not.
"""

from __future__ import annotations

from dataclasses import replace

from shardlib.frontend.traced_model import TracedModel, state_stays
from shardlib.lowering.runtime.random_keys import draws
from shardlib.report import Finding


def evaluated_as_trained(of: TracedModel) -> TracedModel:
    """The same, with a finding where evaluations are to use a loss that trains: it draws random
    numbers, or changes the state of a model that has no mode for evaluations.
    """
    model, traced = of.model, of.traced
    what = [
        *(["draws random numbers"] if draws(traced.closed_jaxpr) else []),
        *([] if state_stays(model, traced) else [f"updates {', '.join(model.state)}"]),
    ]
    if model.has_modes or not what:
        return of
    finding = Finding(
        code="evaluation-as-trained",
        severity="warning",
        where="program.evaluate",
        message=f"program.evaluate uses the loss of the step, which {' and '.join(what)}.",
        hint=(
            "shardlib.compile(..., evaluation=loss_without_dropout_and_with_running_averages),"
            " see docs/evaluation.md"
        ),
    )
    return replace(of, model=replace(model, findings=(*model.findings, finding)))
