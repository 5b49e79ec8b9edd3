"""The tables of `docs/peers.md`, from the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MIB, GIB = 2**20, 2**30
NONE = "not compiled"


def tables(page: str, data: Mapping[str, Any]) -> str:
    """A page with its tables written anew, each between `<!-- NAME -->` and `<!-- /NAME -->`."""
    made = {
        "peers": _measured(data["simulated"]),
        "tpu": _compiled(data["tpu"]["peers"]),
        "priced": _priced(data["priced"]["frameworks"]),
        "left out": "\n".join(f"- **{name}**: {why}." for name, why in data["not_run"].items()),
    }
    for name, text in made.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, after = page.split(start)[0], page.split(end)[1]
        page = f"{before}{start}{text}{end}{after}"
    return page


def _table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [["", *head], ["---"] * (len(head) + 1)]
    lines += [[f"`{name}`", *cells] for name, cells in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def _mesh(one: Mapping[str, Any]) -> str:
    return " x ".join(f"{name}={size}" for name, size in one["mesh"].items())


def _measured(peers: Mapping[str, Any]) -> str:
    head = ("mesh", "step", "trace", "compile", "wire bytes", "parameters", "FLOPs of products")
    return _table(
        head,
        {
            name: (
                _mesh(one),
                f"{one['over_flax_fsdp']:.2f}",
                f"{one['trace_seconds']:.1f} s",
                f"{one['compile_seconds']:.1f} s",
                f"{one['traffic'].get('wire_bytes', 0.0) / MIB:,.1f} MiB",
                f"{one['parameters'] / 1e6:.2f} M",
                f"{one['product_flops'] / 1e9:.1f} G",
            )
            for name, one in peers.items()
        },
    )


def _compiled(peers: Mapping[str, Any]) -> str:
    def row(one: Mapping[str, Any]) -> tuple[str, ...]:
        if "error" in one:
            return (NONE,) * 6
        return (
            _mesh(one),
            f"{one['compile_seconds']:.0f} s",
            f"{one['peak_bytes'] / MIB:,.1f} MiB",
            f"{one['wire_bytes'] / MIB:,.1f} MiB",
            f"{one['cycles'] / 1e6:.1f} M",
            f"{one['parameters'] / 1e6:.2f} M",
        )

    head = ("mesh", "compile", "memory a chip", "wire bytes", "cycles", "parameters")
    return _table(head, {name: row(one) for name, one in peers.items()})


def _priced(frameworks: Mapping[str, Any]) -> str:
    head = ("step", "MFU", "memory a device", "mesh")
    return _table(
        head,
        {
            name: ("none fits", "", "", one["error"])
            if "error" in one
            else (
                f"{one['step_seconds']:.2f} s",
                f"{one['mfu']:.1%}",
                f"{one['peak_bytes'] / GIB:.1f} GiB",
                one["mesh"],
            )
            for name, one in frameworks.items()
        },
    )
