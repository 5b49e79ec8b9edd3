"""A machine draws its links: every tier with its rate, and a box for each part it connects."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shardlib.machines.topology import topology

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("spelled", "boxes", "says"),
    [
        ("4*h100:8", 4 + 8, ["450.0 GB/s", "4 · 50.0 GB/s"]),
        ("v5e:16x16", 16, ["16 x 16 · ", "of 256"]),
        ("cpu:8", 8, ["8 · "]),
    ],
)
def test_every_tier_is_drawn(spelled: str, boxes: int, says: list[str]) -> None:
    text = topology(spelled)._repr_svg_()
    root = ElementTree.fromstring(text)
    assert len(list(root.iter(f"{SVG}rect"))) == boxes + 1  # and the page
    words = [one.text or "" for one in root.iter(f"{SVG}text")]
    assert all(any(said in word for word in words) for said in says), words
    assert len(text) < 5000 and "http" not in text.replace("http://www.w3.org/2000/svg", "")
