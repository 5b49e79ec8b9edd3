"""Transformers as TOML files.

The keys are the fields of `TransformerConfig`; mixture of experts, latent attention and rope
scaling are tables:

>>> config = parse('''
... vocab_size = 32000
... layers = 4
... embed = 64
... heads = 4
... kv_heads = 2
... head_dim = 16
... mlp = 128
... [experts]
... count = 8
... per_token = 2
... mlp = 32
... ''', name="small")
>>> config.experts.count, config.max_seq
(8, 2048)
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from shardlib.errors import MissingFileError, ModelError, raise_all
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import Experts, LatentAttention, RopeScaling
from shardlib.untrusted import construct, fit, parse_toml, read_bytes, shown
from shardlib.untrusted.documents import TOML_LIMITS
from shardlib.untrusted.json_types import JsonMapping
from shardlib.untrusted.shown import bounded

_TABLES: Mapping[str, type] = {
    "experts": Experts,
    "latent": LatentAttention,
    "rope_scaling": RopeScaling,
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
}


def read(path: str | Path) -> TransformerConfig:
    """Reads a model card; its name is the file's, unless the card has one."""
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"there is no model card {path}")
    return parse(
        read_bytes(path, "model card", ModelError, limit=TOML_LIMITS.bytes),
        name=path.stem,
        source=str(path),
    )


def parse(text: str | bytes, *, name: str, source: str = "the model card") -> TransformerConfig:
    """Reads the text of a model card; see `read`."""
    data = {"name": name, **parse_toml(text, source, ModelError)}
    failures = _check(TransformerConfig, data, "")
    for table, kind in _TABLES.items():
        if isinstance(data.get(table), Mapping):
            failures += _check(kind, data[table], f"{table}.")
    if failures:
        raise_all(ModelError, f"{source} is not usable", bounded(failures))
    return construct(TransformerConfig, data, source, ModelError)


def _check(kind: type, data: JsonMapping, prefix: str) -> list[str]:
    fields_by_name = {field.name: field for field in fields(kind)}
    failures = [
        f"{prefix}{name} is missing"
        for name, field in fields_by_name.items()
        if name not in data and field.default is MISSING
    ]
    for key, value in data.items():
        if key not in fields_by_name:
            near = difflib.get_close_matches(key, fields_by_name, 1)
            failures.append(
                f"{fit(prefix + key, 80)} is no key"
                + (
                    f"; did you mean {prefix}{near[0]}?"
                    if near
                    else f"; keys are {', '.join(fields_by_name)}"
                )
            )
            continue
        expected = _TYPES.get(str(fields_by_name[key].type), (dict,))
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            failures.append(
                f"{prefix}{key} is {shown(value)}; expected"
                f" {'a table' if expected == (dict,) else fields_by_name[key].type}"
            )
    return failures
