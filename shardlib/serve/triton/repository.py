"""The folders of a repository.

    of a single pass     NAME
    of a language model  NAME            decoupled: text or tokens -> pieces of text, and tokens
                         NAME_tokenize   text -> tokens
                         NAME_states     tokens -> the mean of the last states
                         NAME_normalise  vectors of length 1
                         NAME_embedding  the ensemble of the three

Each has `config.pbtxt`, and a folder `1` with what its version is made of. Weights stand once for
the engine and once for the pass.

`config.pbtxt`: what Triton knows of a model, in protobuf's text format.

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
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from shardlib.annotation.trees import Tree
from shardlib.errors import ArgumentError, CheckpointError, ModelError
from shardlib.serve.artefacts import RowShape, SinglePass, single_pass, write_artefact
from shardlib.serve.folders import write_folder
from shardlib.serve.served import Served
from shardlib.untrusted.data import JsonObject, shown

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


MODELS = Path(__file__).parent / "models"


def embedding_pass(served: Served, seq: int) -> SinglePass:
    """The mean of the last states of a language model, over the tokens that a row has."""
    hidden = served.hidden
    if hidden is None:
        raise ModelError(f"{served.name} does not give the states before its logits")

    def run(model: Tree, inputs: Mapping[str, jax.Array]) -> Tree:
        states = hidden(model, inputs["tokens"]).astype(jnp.float32)
        count = inputs["length"]  # [rows, 1]
        there = (jnp.arange(seq)[None, :] < count)[..., None]
        total = jnp.where(there, states, 0.0).sum(axis=1)
        return {"embedding": total / jnp.maximum(count, 1)}

    inputs = {
        "tokens": jax.ShapeDtypeStruct((1, seq), jnp.int32),
        "length": jax.ShapeDtypeStruct((1, 1), jnp.int32),
    }
    return single_pass(served.init, run, inputs, weights=served.weights, name=served.name)


@dataclass(frozen=True, kw_only=True)
class Repository:
    """Options of how a repository is written.

    Attributes:
        folder: made where it is not there; others' models in it are left alone.
        rows: of a batch at most.
        fixed: whether programs take exactly so many rows, see `write_artefact`.
        instances: of each single pass, beside each other.
        python_path: folders that Triton's Python looks in for JAX, and for shardlib where there is
            a language model; none where it finds them itself.
    """

    folder: Path
    rows: int = 16
    fixed: bool = False
    instances: int = 1
    python_path: tuple[str, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Batches that programs are compiled for: powers of two."""
        if self.fixed:
            return [self.rows]
        powers = [1 << n for n in range(self.rows.bit_length()) if 1 << n < self.rows]
        return [*powers, self.rows]

    def write_pass(self, single: SinglePass) -> str:
        """Writes a single pass; returns its name."""
        name = _checked(single.name)
        place = self._version(name)
        artefact = write_artefact(single, place, batch=self.rows if self.fixed else None)
        self._program(place, "forward", {"sizes": self.sizes})
        inputs, outputs = _tensors(artefact.inputs), _tensors(artefact.outputs)
        self._config(
            batched(
                name,
                inputs,
                outputs,
                rows=self.rows,
                instances=self.instances,
                warm=self.sizes,
            )
        )
        return name

    def write_language_model(
        self,
        served: Served,
        *,
        source: Path | None = None,
        capacity: Mapping[str, int] | None = None,
        seq: int = 128,
    ) -> list[str]:
        """Writes a language model, and its embeddings; returns the names of all.

        Args:
            source: folder that its tokenizer comes from; None where tokens are bytes.
        """
        name = _checked(served.name)
        place = self._version(name)
        write_folder(served, place / "model", source=source)
        self._program(place, "generate", {"capacity": dict(capacity or {})})
        self._config(
            decoupled(
                name,
                [
                    tensor("text", "text", [1], optional=True),
                    tensor("tokens", "int32", [-1], optional=True),
                    tensor("most", "int32", [1], optional=True),
                    tensor("temperature", "float32", [1], optional=True),
                    tensor("seed", "int32", [1], optional=True),
                ],
                [tensor("text", "text", [1]), tensor("token", "int32", [1])],
            )
        )
        tokenizer = place / "model" / "tokenizer.json"
        return [name, *self._embedding(name, tokenizer, embedding_pass(served, seq), seq)]

    def _embedding(self, name: str, tokenizer: Path, states: SinglePass, seq: int) -> list[str]:
        words, normal, ensemble_name = f"{name}_tokenize", f"{name}_normalise", f"{name}_embedding"
        place = self._version(words)
        shutil.copyfile(tokenizer, place / "tokenizer.json")
        self._program(place, "tokenize", {"seq": seq})
        text_input = tensor("text", "text", [1])
        tokens = [tensor("tokens", "int32", [seq]), tensor("length", "int32", [1])]
        self._config(batched(words, [text_input], tokens, rows=self.rows, instances=self.instances))
        middle = self.write_pass(replace(states, name=f"{name}_states"))
        self._program(self._version(normal), "normalise", {})
        width = [-1]
        self._config(
            batched(
                normal,
                [tensor("embedding", "float32", width)],
                [tensor("vector", "float32", width)],
                rows=self.rows,
            )
        )
        self._version(ensemble_name)
        same = {"tokens": "tokens", "length": "length"}
        self._config(
            ensemble(
                ensemble_name,
                [text_input],
                [tensor("vector", "float32", width)],
                rows=self.rows,
                steps=[
                    (words, {"text": "text"}, same),
                    (middle, same, {"embedding": "embedding"}),
                    (normal, {"embedding": "embedding"}, {"vector": "vector"}),
                ],
            )
        )
        return [words, middle, normal, ensemble_name]

    def _version(self, name: str) -> Path:
        """The folder of a model's first version."""
        place = self.folder / name / "1"
        try:
            place.mkdir(parents=True)
        except FileExistsError as error:
            raise CheckpointError(
                f"{self.folder} has a model {name} already; nothing is overwritten\nTry: another"
                " folder"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"the repository could not be written to {self.folder} ({error})\nTry: another"
                " folder"
            ) from error
        return place

    def _program(self, place: Path, which: str, settings: JsonObject) -> None:
        shutil.copyfile(MODELS / f"{which}.py", place / "model.py")
        shutil.copyfile(MODELS / "arrays.py", place / "arrays.py")
        contents = {"python_path": list(self.python_path), **settings}
        (place / "settings.json").write_text(
            json.dumps(contents, indent=2) + "\n", encoding="utf-8"
        )

    def _config(self, fields: Mapping[str, Field]) -> None:
        path = self.folder / str(fields["name"]) / "config.pbtxt"
        path.write_text(text(fields) + "\n", encoding="utf-8")


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ArgumentError(
            f"{shown(name)} is not a name of a model of Triton: letters, digits, dots, dashes"
        )
    return name


def _tensors(shapes: Mapping[str, RowShape]) -> Sequence[Mapping[str, Field]]:
    unknown = sorted({shape.dtype for shape in shapes.values()} - set(TYPES))
    if unknown:
        raise ArgumentError(
            f"Triton has no arrays of {', '.join(unknown)} here\nTry: a pass that gives float32"
        )
    flat = [key for key, shape in shapes.items() if not shape.dims]
    if flat:
        raise ArgumentError(
            f"a row of {shown(flat[0])} has no dims, and Triton's rows have at least one\nTry:"
            " [rows, 1]"
        )
    return [tensor(key, shape.dtype, shape.dims) for key, shape in shapes.items()]
