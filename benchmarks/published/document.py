"""A file of published training runs: hardware, models and rows, in YAML or JSON.

The schema: `hardware.chips` and `hardware.systems` (figures of a chip, and of the machines that
join chips), `models` (layers, widths, experts), and `rows` (a model on a system under a plan, with
what was measured). A row says `parallel` in devices: tp x pp x cp x dp x fsdp of them; `ep` re-uses
ranks of dp and fsdp.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Document:
    """What the file says.

    Attributes:
        chips, systems, models: entries by name.
        rows: runs.
    """

    chips: Mapping[str, Entry]
    systems: Mapping[str, Entry]
    models: Mapping[str, Entry]
    rows: tuple[Entry, ...]


def read(path: Path) -> Document:
    """Reads a file, YAML or `.json`; a `SystemExit` says what the schema has and it has not."""
    text, loader = path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=loader)
    lacking = [name for name in ("hardware", "models", "rows") if name not in data]
    if lacking:
        raise SystemExit(
            f"{path} has no {', '.join(lacking)}; it needs hardware (chips, systems), models and"
            " rows"
        )
    return Document(
        chips=data["hardware"]["chips"],
        systems=data["hardware"]["systems"],
        models=data["models"],
        rows=tuple(data["rows"]),
    )
