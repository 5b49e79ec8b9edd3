"""`shardlib models | topologies`: what is known by name."""

from __future__ import annotations

from shardlib.cli.app import AsJson
from shardlib.cli.output import show


def models_command(as_json: AsJson = False) -> None:
    """List the models that are known by name."""
    from shardlib.models import PRESETS
    from shardlib.planning.units.quantity import parameters_text

    rows = [
        {
            "model": name,
            "parameters": c.parameter_count(),
            "layers": c.layers,
            "embed": c.embed,
            "heads": c.heads,
            "vocab": c.vocab_size,
            "experts": c.experts.count if c.experts else 0,
            "max_seq": c.max_seq,
        }
        for name, c in PRESETS.items()
    ]
    show(
        rows,
        as_json,
        text={"parameters": parameters_text, "experts": lambda n: str(n) if n else ""},
    )


def topologies_command(as_json: AsJson = False) -> None:
    """List the chips that the catalogue knows, and how a topology of them is spelled."""
    from shardlib.hardware.catalog import CATALOG
    from shardlib.planning.units.quantity import bytes_text, count_text

    rows = [
        {
            "chip": name,
            "example": p.example,
            "flops_per_s": p.chip.peak("bfloat16"),
            "hbm_bytes": p.chip.hbm_bytes,
            "hbm_bytes_per_s": p.chip.hbm_bytes_per_s,
            "link": p.fast.name,
            "link_bytes_per_s": p.fast.bytes_per_s,
            "network": p.slow.name,
            "network_bytes_per_s": p.slow.bytes_per_s,
        }
        for name, p in CATALOG.items()
    ]

    def rate(value: float) -> str:
        return count_text(value, "B/s")

    show(
        rows,
        as_json,
        text={
            "flops_per_s": lambda f: count_text(f, "FLOP/s"),
            "hbm_bytes": bytes_text,
            "hbm_bytes_per_s": rate,
            "link_bytes_per_s": rate,
            "network_bytes_per_s": rate,
        },
    )
