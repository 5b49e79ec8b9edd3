"""The result as one picture: bars over plain Flax with FSDP by hand."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

COLOURS = ("#0072b2", "#56b4e9", "#999999", "#4d4d4d", "#e69f00", "#d55e00", "#009e73", "#66c2a5")
COLOURS += ("#cc79a7", "#e7b0cd")
BASE, LEFT, WIDTH = "flax-fsdp", 150, 470
STYLE = "text { font: 13px system-ui, sans-serif; fill: #1c1c1e } rect.page { fill: #ffffff }"


def ratios(devices: Mapping[str, Any], tpu: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Title -> peer -> its figure over that of plain Flax with FSDP by hand."""
    sent = {name: one["traffic"].get("wire_bytes", 0.0) for name, one in devices.items()}
    found = {
        "step, simulated devices": {name: one["over_flax_fsdp"] for name, one in devices.items()},
        "wire bytes, simulated devices": {name: n / sent[BASE] for name, n in sent.items()},
    }
    for title, key in (
        ("memory, v5e", "peak_bytes"),
        ("wire bytes, v5e", "wire_bytes"),
        ("cycles of its kernels, v5e", "cycles"),
    ):
        if key in tpu.get(BASE, {}):
            base = tpu[BASE][key]
            found[title] = {name: one[key] / base for name, one in tpu.items() if key in one}
    return found


def picture(devices: Mapping[str, Any], tpu: Mapping[str, Any]) -> str:
    """An SVG, each group of bars with a scale of its own."""
    shapes, y = list[str](), 44
    for title, row in ratios(devices, tpu).items():
        most = max(row.values())
        shapes.append(f'<text x="10" y="{y}" style="font-weight: 600">{title}</text>')
        for at, name in enumerate(devices):
            y += 19
            shapes.append(f'<text x="10" y="{y}">{escape(name)}</text>')
            if name not in row:
                shapes.append(f'<text x="{LEFT}" y="{y}">not compiled</text>')
                continue
            wide = WIDTH * row[name] / most
            shapes += [
                f'<rect x="{LEFT}" y="{y - 11}" height="14" width="{wide:.1f}"'
                f' style="fill: {COLOURS[at % len(COLOURS)]}"/>',
                f'<text x="{LEFT + 8 + wide:.1f}" y="{y}">{row[name]:.2f}</text>',
            ]
        y += 32
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {y}" width="700"'
        f' height="{y}" role="img"><title>One job side by side</title><style>{STYLE}</style>'
        f'<rect class="page" width="700" height="{y}"/>'
        '<text x="10" y="18">Over plain Flax with FSDP by hand (1.00); shorter is better</text>'
        + "".join(shapes)
        + "</svg>\n"
    )
