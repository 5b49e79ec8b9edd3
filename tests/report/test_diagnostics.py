"""What a diagnostic raises is a finding, and nothing of shardlib returns findings another way."""

from __future__ import annotations

import ast
from pathlib import Path

import jax.numpy as jnp
import optax
from flax import linen as nn

import shardlib
from shardlib.findings import Finding, diagnostic
from shardlib.frontend import model as reading

#: Packages whose findings are about a model that is planned or lowered.
ROOMS = ("annotation", "propagation", "planner", "frontend", "lowering", "verification")


@diagnostic
def _broken(number: int) -> list[Finding]:
    return [Finding(code="fine", severity="info", message=str(1 // number))]


def test_a_diagnostic_that_raises_is_a_finding():
    assert [one.message for one in _broken(1)] == ["1"]
    [failed] = _broken(0)
    assert (failed.code, failed.severity, failed.where) == (
        "diagnostic-failed",
        "warning",
        "_broken",
    )
    assert "ZeroDivisionError: integer division or modulo by zero" in failed.message


def test_a_model_is_planned_though_a_diagnostic_raises(monkeypatch):
    def fails(jaxpr):
        raise ValueError("rank")

    monkeypatch.setattr(reading, "pinned_activations", fails)
    module, x = nn.Dense(8), jnp.ones((16, 8))
    plan = shardlib.plan(
        shardlib.linen(module, x),
        lambda params, x: jnp.mean(module.apply({"params": params}, x) ** 2),
        optax.sgd(0.1),
        x,
        topology="cpu:8",
    )
    assert [one.where for one in plan.findings if one.code == "diagnostic-failed"] == [
        "ignored_constraints"
    ]


def test_what_returns_findings_alone_is_a_diagnostic():
    """But for what refuses a user's input, which says so, and collections of findings."""
    package = Path(shardlib.__file__).parent
    plain = [
        f"{path.relative_to(package)}: {node.name}"
        for room in ROOMS
        for path in sorted((package / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns).partition("[")[2].startswith("Finding")
        and not {"diagnostic", "property", "cached_property"}
        & {ast.unparse(one) for one in node.decorator_list}
        and "Raises:" not in (ast.get_docstring(node) or "")
    ]
    assert plain == []
