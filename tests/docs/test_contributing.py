"""The recipes of `docs/recipes.md` for a chip and for a primitive, done; the page names the others."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from shardlib.graph import elementwise
from shardlib.machines import catalog
from shardlib.machines.chips import Memory, Product, gpu, infiniband, nvlink
from shardlib.machines.topology import topology
from shardlib.tracing.primitives import TABLE
from shardlib.tracing.primitives import Primitive as Known
from shardlib.tracing.rules import Description, RuleInput
from shardlib.tracing.trace import graph_from_jaxpr

ROOT = Path(__file__).parents[2]


def test_every_recipe_names_a_test_that_exists():
    page = (ROOT / "docs" / "recipes.md").read_text()
    recipes = re.findall(r"^## (.*)$", page, re.M)
    tests = re.findall(r"^`(tests/\S+\.py)`$", page, re.M)
    assert len(recipes) == len(tests) >= 5
    assert [name for name in tests if not (ROOT / name).exists()] == []
    assert all(len(part.splitlines()) <= 10 for part in page.split("\n## ")[1:])


def test_files_and_folders_that_the_page_names_exist():
    page = "".join((ROOT / name).read_text() for name in ("CONTRIBUTING.md", "docs/recipes.md"))
    named = re.findall(r"`((?:shardlib|tests|docs)/[\w/.*]+)`", page)
    assert [name for name in named if not list(ROOT.glob(name))] == []


def test_the_catalogue_has_all_products_by_the_names_of_their_chips():
    assert list(catalog.CATALOG.values()) == [*catalog.TPUS, *catalog.GPUS, catalog.CPU]
    assert all(product.chip.vendor == "google" for product in catalog.TPUS)
    assert all(product.chip.vendor == "nvidia" for product in catalog.GPUS)


def test_a_chip_is_a_product_in_the_catalogue(monkeypatch: pytest.MonkeyPatch):
    product = Product(
        chip=gpu(
            "x100",
            Memory(
                hbm_bytes=100 * 2**30,
                hbm_bytes_per_s=5e12,
                usable_bytes=90 * 2**30,
                host_bytes_per_s=5e10,
            ),
            bf16=2e15,
            tf32=1e15,
            int8=4e15,
            fp8=None,
            sources=("its data sheet",),
        ),
        fast=nvlink(900e9, 0.8, "its data sheet"),
        slow=infiniband(50e9, "its data sheet"),
        dims=1,
        most=4,
    )
    with monkeypatch.context() as patch:
        patch.setitem(catalog.CATALOG, "x100", product)
        machine = topology("3*x100:4")
    assert machine.devices == 12 and machine.chip.peak("bfloat16") == 2e15
    assert [tier.bytes_per_s for tier in machine.tiers] == [50e9, 900e9]
    assert machine.chip.usable_bytes == 90 * 2**30


def test_a_primitive_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch):
    blend = Primitive("blend")
    blend.def_abstract_eval(lambda a, b: a)

    def described(call: RuleInput) -> Description:
        return Description(elementwise(call.operands, call.results[0]), "elementwise", flops=7.0)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(blend.bind(a, b))

    matrix = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    traced = jax.make_jaxpr(loss)(matrix, matrix)
    names = [("a", "batch"), ("b", "batch")]
    assert any("blend" in str(finding) for finding in graph_from_jaxpr(traced, names).findings)
    monkeypatch.setitem(TABLE, "blend", Known(factors=described))
    graph = graph_from_jaxpr(traced, names)
    assert graph.findings == ()
    (op,) = [op for op in graph.ops if op.kind == "blend"]
    assert op.flops == 7.0 and len(op.rule.sizes) == 2 and not op.rule.summed
