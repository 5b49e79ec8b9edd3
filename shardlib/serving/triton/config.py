"""`config.pbtxt`: what Triton knows of a model, in protobuf's text format.

>>> print(text({"name": "a", "dims": [2, -1], "kind": Word("KIND_CPU"), "part": {"count": 1}}))
name: "a"
dims: [2, -1]
kind: KIND_CPU
part {
  count: 1
}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

#: NumPy's dtypes -> Triton's.
TYPES: Mapping[str, str] = {
    "bool": "TYPE_BOOL",
    **{f"int{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"TYPE_UINT{bits}" for bits in (8, 16, 32, 64)},
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "text": "TYPE_STRING",
}


class Word(str):
    """A word that stands without quotes."""

    __slots__ = ()


#: What a field may be; a list of messages is the field so many times.
Field = (
    str
    | int
    | bool
    | Word
    | Sequence[int]
    | Mapping[str, "Field"]
    | Sequence[Mapping[str, "Field"]]
)


def text(fields: Mapping[str, Field], indent: str = "") -> str:
    """A message in protobuf's text format."""
    return "\n".join(line for name, value in fields.items() for line in _lines(name, value, indent))


def _lines(name: str, value: Field, indent: str) -> list[str]:
    if isinstance(value, Mapping):
        inner = text(value, indent + "  ")
        return [f"{indent}{name} {{", *([inner] if inner else []), f"{indent}}}"]
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return [line for item in value for line in _lines(name, item, indent)]
    if isinstance(value, Word):
        return [f"{indent}{name}: {value}"]
    if isinstance(value, str):
        return [f"{indent}{name}: {json.dumps(value)}"]
    if isinstance(value, bool):
        return [f"{indent}{name}: {str(value).lower()}"]
    if isinstance(value, int):
        return [f"{indent}{name}: {value}"]
    return [f"{indent}{name}: {json.dumps(list(value))}"]


def tensor(
    name: str, dtype: str, dims: Sequence[int], *, optional: bool = False
) -> dict[str, Field]:
    """An input or output.

    Args:
        dtype: a key of `TYPES`.
    """
    fields: dict[str, Field] = {"name": name, "data_type": Word(TYPES[dtype]), "dims": list(dims)}
    return fields | ({"optional": True} if optional else {})


def batched(
    name: str,
    inputs: Sequence[Mapping[str, Field]],
    outputs: Sequence[Mapping[str, Field]],
    *,
    rows: int,
    instances: int = 1,
    delay_us: int = 2000,
    warm: Sequence[int] = (),
) -> dict[str, Field]:
    """A model whose requests Triton puts together.

    Args:
        delay_us: microseconds that a request waits for others.
    """
    fields: dict[str, Field] = {
        "name": name,
        "backend": "python",
        "max_batch_size": rows,
        "input": list(inputs),
        "output": list(outputs),
        "dynamic_batching": {"max_queue_delay_microseconds": delay_us},
        "instance_group": [{"count": instances, "kind": Word("KIND_CPU")}],
        "version_policy": {"latest": {"num_versions": 2}},
    }
    if warm:
        fields["model_warmup"] = [
            {
                "name": f"{size} rows",
                "batch_size": size,
                "inputs": [
                    {
                        "key": entry["name"],
                        "value": {
                            "data_type": entry["data_type"],
                            "dims": entry["dims"],
                            "zero_data": True,
                        },
                    }
                    for entry in inputs
                ],
            }
            for size in warm
        ]
    return fields


def decoupled(
    name: str, inputs: Sequence[Mapping[str, Field]], outputs: Sequence[Mapping[str, Field]]
) -> dict[str, Field]:
    """A model that answers a request many times, and schedules requests itself: one instance, since
    Triton does not batch for such models.
    """
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        "input": list(inputs),
        "output": list(outputs),
        "model_transaction_policy": {"decoupled": True},
        "instance_group": [{"count": 1, "kind": Word("KIND_CPU")}],
        "version_policy": {"latest": {"num_versions": 1}},
    }


def ensemble(
    name: str,
    inputs: Sequence[Mapping[str, Field]],
    outputs: Sequence[Mapping[str, Field]],
    *,
    rows: int,
    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]],
) -> dict[str, Field]:
    """Models one after the other.

    Args:
        steps: (model, its input -> ours, its output -> ours), where ours is an input, an output, or
            what an earlier step gave.
    """

    def mapped(names: Mapping[str, str]) -> list[Mapping[str, Field]]:
        return [{"key": key, "value": value} for key, value in names.items()]

    return {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": rows,
        "input": list(inputs),
        "output": list(outputs),
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": model,
                    "model_version": -1,
                    "input_map": mapped(into),
                    "output_map": mapped(out),
                }
                for model, into, out in steps
            ]
        },
    }
