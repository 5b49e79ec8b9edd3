"""What a plan decides, a line for each decision that is not the trivial one.

Labels and words come from the table of decisions. Most lines tell several decisions together, such
as a pipeline with its schedule and chunks; a decision without such a line has one of its own, after
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardlib.axes import MESH_AXES
from shardlib.decisions.table import TABLE
from shardlib.planning.plan import Plan
from shardlib.planning.units.tables import wrapped
from shardlib.schedules.table import named


def decision_lines(plan: Plan) -> list[tuple[str, str]]:
    """(label, decision) for every decision that is not the trivial one."""
    lines = {label: line(plan) for label, line in _LINES.items()}
    for word, entry in TABLE.items():
        if (entry.label or word) not in lines:
            lines[entry.label or word] = _told(word)(plan)
    return [(label, text) for label, text in lines.items() if text]


def untold(label: str, plan: Plan) -> str:
    """What a plan decides that has no line of a label: the meaning of the default."""
    if label in _UNTOLD:
        return _UNTOLD[label](plan)
    meanings = (
        entry.choices.get(entry.default)
        for word, entry in TABLE.items()
        if (entry.label or word) == label
    )
    return next(filter(None, meanings), "none")


def decisions_section(plan: Plan) -> str:
    """The decisions of a plan as text."""
    lines = decision_lines(plan)
    width = max(len(label) for label, _ in lines)
    return "\n".join(
        [
            "Decisions",
            *(line for label, text in lines for line in wrapped(f"  {label:{width}}  ", text)),
        ]
    )


def _told(word: str) -> Callable[[Plan], str]:
    """The words of one decision where it is not its default."""

    def line(plan: Plan) -> str:
        value = getattr(plan, word)
        return TABLE[word].choices.get(value, str(value)) if value != TABLE[word].default else ""

    return line


def _sharded(plan: Plan) -> str:
    sharded = [
        f"{name}_{'·'.join(live)}"
        for name, axes in plan.rules.entries
        if (live := [axis for axis in axes if axis in plan.mesh])
    ]
    return ", ".join(sharded) or "nothing"


def _stored(plan: Plan) -> str:
    if not plan.zero:
        return "ZeRO 0: parameters, gradients and optimizer state sharded as in compute"
    axes = "·".join(_stored_axes(plan)) or "one device"
    return f"ZeRO {plan.zero}: {TABLE['zero'].choices[plan.zero]} sharded over {axes}"


def _stored_axes(plan: Plan) -> list[str]:
    """Mesh axes that shard optimizer state, and do not shard the same parameter in compute."""
    used = {axis for p in plan.parameters for axis in p.state.axes - p.compute.axes}
    return [axis for axis in MESH_AXES if axis in used] or (["fsdp"] if "fsdp" in plan.mesh else [])


def _remat(plan: Plan) -> str:
    words = TABLE["remat"].choices
    if plan.remat_classes:
        return "on the fullest stage " + "; ".join(
            f"{f'{layers} of ' if layers else ''}{name}: {words.get(policy, policy)}"
            for name, policy, layers in plan.remat_classes
        )
    return words.get(plan.remat, plan.remat) + (
        f"; in {plan.remat_layers} layers of the fullest stage only" if plan.remat_layers else ""
    )


def _microbatches(plan: Plan) -> str:
    if plan.microbatches == 1:
        return ""
    groups = plan.accumulation
    return str(plan.microbatches) + (
        f", in {groups} groups, one after the other" if groups > 1 else ""
    )


def _pipeline(plan: Plan) -> str:
    schedule = named(plan.schedule)
    if not schedule.staged:
        return ""
    parts = [f"{plan.mesh['stage']} stages, {schedule.words(plan.virtual_stages)}"]
    if plan.gather == "once":
        by_group = schedule.forward_first and plan.virtual_stages > 1 and plan.accumulation > 1
        often = "for each group of microbatches" if by_group else "a step"
        parts.append(f"weights gathered once {often}")
    return "; ".join([*parts, *filter(None, [_told("pipeline")(plan)])])


def _attention(plan: Plan) -> str:
    return "" if plan.ring else _told("attention")(plan)


def _offloaded(plan: Plan) -> str:
    words = {"optimizer": "optimizer state", "activations": "activations of layers"}
    return " and ".join(words[part] for part in plan.offload if part != "disk")


def _disk(plan: Plan) -> str:
    return "optimizer state" if "disk" in plan.offload else ""


def _over_tensor(word: str) -> Callable[[Plan], str]:
    """The meaning of the default of a decision about the tensor axis."""

    def line(plan: Plan) -> str:
        entry = TABLE[word]
        return entry.choices[entry.default] if "tensor" in plan.mesh else "no tensor axis"

    return line


def _dtypes(plan: Plan) -> str:
    return ", ".join(f"{word.removesuffix('_dtype')} {dtype}" for word, dtype in plan.dtypes)


def _links(plan: Plan) -> str:
    order = plan.axis_order
    return f"{order[0]} on the outermost, {order[-1]} on the innermost" if order else ""


#: Lines by label, in their order.
_LINES: Mapping[str, Callable[[Plan], str]] = {
    "mesh": lambda plan: str(plan.mesh),
    "compute layout": _sharded,
    "stored layout": _stored,
    "residual stream": _told("sequence_parallel"),
    "remat policy": _remat,
    "microbatches": _microbatches,
    "pipeline": _pipeline,
    "context": _told("context"),
    "matmuls over tensor": _told("collective_matmul"),
    "attention": _attention,
    "experts": _told("experts"),
    "host memory": _offloaded,
    "disk": _disk,
    "dtypes": _dtypes,
    "links": _links,
}

#: What plans decide that do not have a line, by its label, where the table does not say it alone.
_UNTOLD: Mapping[str, Callable[[Plan], str]] = {
    "residual stream": _over_tensor("sequence_parallel"),
    "microbatches": lambda plan: "1",
    "matmuls over tensor": _over_tensor("collective_matmul"),
    "attention": lambda plan: TABLE["context" if plan.ring else "attention"].choices[
        "ring" if plan.ring else "traced"
    ],
    "dtypes": lambda plan: "those of the model",
    "links": lambda plan: "the usual order",
}
