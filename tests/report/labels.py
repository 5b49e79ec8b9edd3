"""Where the labels of a picture stand: the box of each text, as wide as DejaVu Sans draws it, the
widest of the fonts that people have.

>>> picture = '<svg viewBox="0 0 99 20"><text x="0" y="9">one</text><text x="9" y="9">two</text></svg>'
>>> [(a.text, b.text) for a, b in collisions(labels(picture))]
[('one', 'two')]
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree

#: Widths of characters, parts of the size of the font; others are as wide as digits.
WIDTHS = {
    **dict.fromkeys("ijl'|", 0.28),
    **dict.fromkeys(" .,:;·!()[]-/ftrI", 0.39),
    **dict.fromkeys("ABCDEFGHJKLNOPQRSTUVXYZ&", 0.72),
    **dict.fromkeys("mMwW%…=+<>", 0.9),
}
DIGIT = 0.63
#: User units by which boxes may overlap.
TOUCH = 1.0


class Label(NamedTuple):
    """A text and its box, user units."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


def labels(picture: str, sheet: str = "") -> list[Label]:
    """The labels of an SVG document.

    Args:
        sheet: a style sheet beside those inside it.
    """
    picture = re.sub(r'\sxmlns="[^"]*"', "", picture)
    root = ElementTree.fromstring(picture)
    sheet += "".join(style.text or "" for style in root.iter("style"))
    sizes = dict(re.findall(r"(?:text)?\.([\w-]+) \{[^}]*?font-size: (\d+)px", sheet))
    return list(_inside(root, 0.0, 0.0, {name: float(size) for name, size in sizes.items()}))


def _inside(
    node: ElementTree.Element, x: float, y: float, sizes: dict[str, float]
) -> Iterator[Label]:
    for child in node:
        if child.tag == "svg":
            moved = (x + float(child.get("x", 0)), y + float(child.get("y", 0)))
            yield from _inside(child, *moved, sizes)
        elif child.tag != "text":
            yield from _inside(child, x, y, sizes)
        elif child.text and child.text.strip():
            yield _label(child, x, y, sizes.get(child.get("class", ""), 13.0))


def _label(node: ElementTree.Element, x: float, y: float, size: float) -> Label:
    text, style = (node.text or "").strip(), node.get("style", "")
    said = re.search(r"font(?:-size)?: ?(?:\w+ )*([\d.]+)px", style)
    size = float(said.group(1) if said else node.get("font-size", size))
    width = size * sum(WIDTHS.get(letter, DIGIT) for letter in text)
    if node.get("class") in ("title", "strong", "figure", "halo"):
        width *= 1.1
    anchor = re.search(r"text-anchor: ?(\w+)", style)
    anchor = anchor.group(1) if anchor else node.get("text-anchor", "")
    before = {"middle": width / 2, "end": width}.get(anchor, 0.0)
    left, base = x + float(node.get("x", 0)), y + float(node.get("y", 0))
    if "rotate(-90" in node.get("transform", ""):
        bottom = base + before
        return Label(text, left - 0.75 * size, bottom - width, left + 0.2 * size, bottom)
    left -= before
    return Label(text, left, base - 0.75 * size, left + width, base + 0.2 * size)


def collisions(found: Iterable[Label]) -> list[tuple[Label, Label]]:
    """Pairs of labels of which a part is in one place."""
    return [
        (a, b)
        for a, b in itertools.combinations(found, 2)
        if min(a.right, b.right) - max(a.left, b.left) > TOUCH
        and min(a.bottom, b.bottom) - max(a.top, b.top) > TOUCH
    ]


def outside(picture: str, sheet: str = "") -> list[Label]:
    """Labels that leave their picture."""
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture).groups()
    return [
        label
        for label in labels(picture, sheet)
        if label.left < -TOUCH
        or label.top < -TOUCH
        or label.right > float(width) + TOUCH
        or label.bottom > float(height) + TOUCH
    ]
