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
        plan: the plan.
        rows: its parameters.
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
            *(_activation(one) for one in plan.activations),
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
    """The plans that were priced, the chosen one apart.

    Args:
        plan: the plan.
    """
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
    mine = next(
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
            "decided": dict(mine.decided) if mine else _decided(plan),
            "s": chosen.step_seconds,
            "b": chosen.device_bytes.peak,
            "fits": True,
        },
        "words": list(words),
        "defaults": {word: str(TABLE[word].default) if word in TABLE else "none" for word in words},
    }


def _decided(plan: Plan) -> dict[str, str]:
    """Decisions of the plan in the words of the landscape."""
    found: dict[str, str] = {}
    for word in ("zero", "remat", "microbatches", "schedule", "virtual_stages", "attention"):
        value = getattr(plan, word)
        if value != TABLE[word].default:
            found[word] = str(value)
    return found


def _array(row: ParameterRow) -> JsonObject:
    one = row.example
    forms = [
        ("stored", one.rest),
        ("in compute, after its gathers", one.compute),
        *([("gradient, reduced", one.gradient)] if one.trained else []),
        *([("optimizer state", one.state)] if one.trained else []),
    ]
    return {
        "group": "parameters",
        "name": row.pattern,
        "shape": list(one.shape),
        "names": [name or "" for name in one.colours],
        "item": ITEMSIZE.get(one.dtype, 4),
        "dtype": one.dtype,
        "forms": [_form(words, layout, row) for words, layout in forms],
    }


def _form(words: str, layout: Layout, row: ParameterRow) -> JsonObject:
    return {
        "words": words,
        "dims": [list(axes) for axes in layout],
        "text": notation(row.example.colours, row.example.shape, layout),
    }


def _activation(one: ActivationLayout) -> JsonObject:
    return {
        "group": "activations",
        "name": one.name,
        "shape": list(one.shape),
        "names": [name or "" for name in one.colours],
        "item": ITEMSIZE.get(one.dtype, 4),
        "dtype": one.dtype,
        "forms": [
            *(_moved(one, move) for move in one.moves if move.before),
            _side(one, "held between operations", one.held, ""),
            *(_moved(one, move) for move in one.moves if not move.before),
        ],
    }


def _moved(one: ActivationLayout, move: Move) -> JsonObject:
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
    return {**_side(one, words, move.layout, note), "sums": list(move.axes) if sums else []}


def _side(one: ActivationLayout, words: str, layout: Layout, note: str) -> JsonObject:
    return {
        "words": words,
        "dims": [list(axes) for axes in layout],
        "text": notation(one.colours, one.shape, layout) + (f", {note}" if note else ""),
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
