"""What the scripts of a page draw: the landscape of plans, and arrays as grids. It stands in the
page once, as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from shardlib.decisions.table import TABLE
from shardlib.graph.graph import ITEMSIZE
from shardlib.layout import Layout
from shardlib.planning.decisions.activation_layout import ActivationLayout, Move, together
from shardlib.planning.pictures.report.svg import AXIS_COLOURS
from shardlib.planning.plan import Plan
from shardlib.planning.text.parameters import ParameterRow, notation
from shardlib.untrusted.json_types import JsonObject


def page_data(
    plan: Plan, rows: Sequence[ParameterRow], usable: float | None, fitting: float | None
) -> str:
    """The data of a page as a JSON element that no text in it can close.

    Args:
        usable: bytes of a device that a program can use; None where they are not known.
        fitting: bytes that plans may fill of them.
    """
    data: JsonObject = {
        "axes": [
            {"name": axis, "size": plan.mesh[axis], "colour": AXIS_COLOURS[axis][0]}
            for axis in plan.mesh
        ],
        "arrays": [
            *(_array(row) for row in rows),
            *(_activation(activation) for activation in plan.activations),
            *_batch(plan),
        ],
        "microbatches": plan.microbatches,
        "landscape": landscape(plan),
        "usable": usable,
        "fitting": fitting,
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def landscape(plan: Plan) -> JsonObject:
    """The plans that were priced, the chosen one apart."""
    chosen = plan.estimate
    words: dict[str, None] = {}
    points: list[JsonObject] = []
    for point in plan.search.landscape:
        words |= dict.fromkeys(word for word, _ in point.decided)
        points.append(
            {
                "mesh": str(point.mesh),
                "axes": dict(point.mesh),
                "decided": dict(point.decided),
                "s": point.step_seconds,
                "b": point.peak_bytes,
                "fits": point.fits,
            }
        )
    chosen_point = next(
        (
            point
            for point in plan.search.landscape
            if point.mesh == plan.mesh
            and math.isclose(point.step_seconds, chosen.step_seconds, rel_tol=1e-5)
        ),
        None,
    )
    return {
        "points": points,
        "chosen": {
            "mesh": str(plan.mesh),
            "axes": dict(plan.mesh),
            "decided": dict(chosen_point.decided) if chosen_point else _decided(plan),
            "s": chosen.step_seconds,
            "b": chosen.device_bytes.peak,
            "fits": True,
        },
        "words": list(words),
        "defaults": {word: str(TABLE[word].default) if word in TABLE else "none" for word in words},
    }


def _decided(plan: Plan) -> dict[str, str]:
    """Decisions of the plan in the words of the landscape."""
    decided: dict[str, str] = {}
    for word in ("zero", "remat", "microbatches", "schedule", "virtual_stages", "attention"):
        value = getattr(plan, word)
        if value != TABLE[word].default:
            decided[word] = str(value)
    return decided


def _array(row: ParameterRow) -> JsonObject:
    parameter = row.example
    forms = [
        ("stored", parameter.rest),
        ("in compute, after its gathers", parameter.compute),
        *([("gradient, reduced", parameter.gradient)] if parameter.trained else []),
        *([("optimizer state", parameter.state)] if parameter.trained else []),
    ]
    return {
        "group": "parameters",
        "name": row.pattern,
        "shape": list(parameter.shape),
        "names": [name or "" for name in parameter.colours],
        "item": ITEMSIZE.get(parameter.dtype, 4),
        "dtype": parameter.dtype,
        "forms": [_form(words, layout, row) for words, layout in forms],
    }


def _form(words: str, layout: Layout, row: ParameterRow) -> JsonObject:
    return {
        "words": words,
        "dims": [list(axes) for axes in layout],
        "text": notation(row.example.colours, row.example.shape, layout),
    }


def _activation(activation: ActivationLayout) -> JsonObject:
    return {
        "group": "activations",
        "name": activation.name,
        "shape": list(activation.shape),
        "names": [name or "" for name in activation.colours],
        "item": ITEMSIZE.get(activation.dtype, 4),
        "dtype": activation.dtype,
        "forms": [
            *(_moved(activation, move) for move in activation.moves if move.before),
            _side(activation, "held between operations", activation.held, ""),
            *(_moved(activation, move) for move in activation.moves if not move.before),
        ],
    }


def _moved(activation: ActivationLayout, move: Move) -> JsonObject:
    """An activation on the other side of a collective."""
    over, of = "·".join(move.axes), together(move.of)
    words = f"{'before' if move.before else 'after'} its {move.kind} over {over}"
    sums = move.before and move.kind in ("reduce-scatter", "all-reduce")
    if move.kind == "collective-permute":
        note = f"as {of} hand it on, a shard at a time"
    elif move.before:
        note = f"partial sums over {over}, as {of} makes them" if sums else f"as {of} makes it"
    else:
        note = f"as {of} reads it"
    return {**_side(activation, words, move.layout, note), "sums": list(move.axes) if sums else []}


def _side(activation: ActivationLayout, words: str, layout: Layout, note: str) -> JsonObject:
    return {
        "words": words,
        "dims": [list(axes) for axes in layout],
        "text": notation(activation.colours, activation.shape, layout)
        + (f", {note}" if note else ""),
    }


def _batch(plan: Plan) -> list[JsonObject]:
    """Arrays of the batch, whose shapes a plan does not know."""
    return [
        {
            "group": "batch",
            "name": path,
            "shape": [],
            "names": [],
            "item": 0,
            "dtype": "",
            "forms": [
                {"words": "stored", "dims": [list(axes) for axes in layout], "text": str(layout)}
            ],
        }
        for path, layout in plan.batch_layouts
    ]
