"""Settings of an engine from the words of a command line.

As KEY=VALUE, with the names of the fields of its settings; a field that holds several values may be
given several times.

>>> from shardlib.launching.engines.slurm.settings import SlurmSettings
>>> words = ["partition=gpu", "chain=3", "exclusive=true"]
>>> found = settings_of(SlurmSettings, [*words, "setup=module load cuda", "setup=ulimit -n 65536"])
>>> found.partition, found.chain, found.setup, found.exclusive
('gpu', 3, ('module load cuda', 'ulimit -n 65536'), True)
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from shardlib.errors import LaunchError, raise_all
from shardlib.untrusted.json_types import JsonMapping

Settings = TypeVar("Settings")
TRUTH: Mapping[str, bool] = {"true": True, "false": False}


def settings_of(
    kind: type[Settings], words: Sequence[str], defaults: JsonMapping | None = None
) -> Settings:
    """Settings of an engine from the words of a command line."""
    hints = get_type_hints(kind)
    table: Any = kind
    kinds = {field.name: hints[field.name] for field in fields(table)}
    values: dict[str, Any] = {}
    failures: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name not in kinds:
            failures.append(_unknown(word, name, kinds) if equals else f"{word!r} is no KEY=VALUE")
            continue
        several = kinds[name] == tuple[str, ...]
        value = (*values.get(name, ()), text) if several else _value(kinds[name], text)
        if value is None:
            failures.append(
                f"{name} is {text!r}, and needs"
                f" {'true or false' if bool in _parts(kinds[name]) else 'a whole number'}"
            )
        elif name in values and not several:
            failures.append(f"{name} is given twice")
        values[name] = value
    if failures:
        raise_all(
            LaunchError,
            "options of the engine are not usable",
            failures,
            hint=f"it has {', '.join(kinds)}",
        )
    return kind(**{**(defaults or {}), **values})


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) or (hint,)


def _value(hint: Any, text: str) -> Any:
    """The value of a field, None where the text is none."""
    if bool in _parts(hint):
        return TRUTH.get(text.lower())
    if int in _parts(hint):
        return int(text) if text.isdigit() else None
    return text


def _unknown(word: str, name: str, kinds: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, kinds, n=1)
    return f"{word!r} names no option" + (f". Did you mean {near[0]}?" if near else "")
