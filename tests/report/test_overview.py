"""A plan draws itself on its machine where it has a place there, and is silent where not."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from shardlib.errors import PlanError
from shardlib.layout import MeshShape
from tests.planner.fixture_plan import PLAN

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_names_the_mesh_and_its_axes() -> None:
    plan = replace(PLAN, topology="2*h100:8", mesh=MeshShape(data=2, fsdp=8), axis_order=())
    root = ElementTree.fromstring(plan.svg())
    words = [one.text or "" for one in root.iter(f"{SVG}text")]
    assert any("data=2 x fsdp=8" in word for word in words)
    assert any(word.startswith("data 2") for word in words)
    assert any(word.startswith("fsdp 8") for word in words)
    assert plan._repr_svg_() == plan.svg()


def test_a_mesh_that_has_no_place_is_an_error_and_no_picture_in_a_notebook() -> None:
    plan = replace(PLAN, topology="2*h100:8", mesh=MeshShape(data=64), axis_order=())
    with pytest.raises(PlanError, match="no place"):
        plan.svg()
    assert plan._repr_svg_() is None
    assert replace(PLAN, topology="no such machine")._repr_svg_() is None
