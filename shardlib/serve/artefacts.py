"""A single pass of a model (classification, embeddings, recommendation, logits) as files that
programs without shardlib run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from safetensors.numpy import save_file

from shardlib import models
from shardlib.annotation.model import Init, read
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree, path_text
from shardlib.errors import ArgumentError, CheckpointError, ModelError
from shardlib.models.presets import UserModel
from shardlib.serve.served import Served
from shardlib.serve.step import both
from shardlib.untrusted.data import JsonObject, fit, printable, shown

#: Tokens of a row where nobody says how many.
ROW = 128
#: (model, inputs by name) -> outputs by name, or one array; rows in the first dim of all.
PassFunction = Callable[[Tree, Mapping[str, jax.Array]], Tree]


@dataclass(frozen=True, kw_only=True)
class SinglePass:
    """The computation on a batch.

    Attributes:
        name: for people and servers.
        model: whose it is.
        weights: (params, state).
        run: the pass.
        inputs: by name; their first dim is that of the rows.
    """

    name: str
    model: Model
    weights: tuple[Tree, Tree]
    run: PassFunction
    inputs: Mapping[str, jax.ShapeDtypeStruct]


def single_pass(
    init: Init,
    forward: PassFunction,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    weights: Tree | int = 0,
    name: str = "model",
) -> SinglePass:
    """A pass of a model of the user's own.

    Args:
        forward: (model, inputs) -> outputs by name, or one array; rows in the first dim of all.
        inputs: arrays, or shapes and dtypes, by name; rows in the first dim.
    """
    flat = {
        key: jax.ShapeDtypeStruct(tuple(shape.shape), shape.dtype) for key, shape in inputs.items()
    }
    if not flat or not all(shape.shape for shape in flat.values()):
        raise ArgumentError("the inputs of a pass are arrays by name, with rows in the first dim")
    model = read(init)
    arrays = both(model, weights)
    return SinglePass(name=name, model=model, weights=arrays, run=forward, inputs=flat)


def user_pass(model: UserModel, word: str, seq: int | None = None) -> SinglePass:
    """The pass that a user's function gives, see `shardlib.models.presets`."""
    if seq is not None:
        raise ArgumentError(
            f"{word} brings its own batch; --seq cannot change it\nTry: leave out --seq"
        )
    if model.outputs is None or not isinstance(model.batch, Mapping):
        raise ModelError(
            f"{word} gives no 'outputs', (model, batch) -> arrays by name, over a batch that is a"
            " mapping of arrays\nTry: add it to what the function returns"
        )
    return single_pass(
        model.init,
        model.outputs,
        model.batch,
        weights=0 if model.weights is None else model.weights,
        name=model.name.rpartition(":")[2] or "model",
    )


def logits_pass(served: Served, seq: int) -> SinglePass:
    """The logits of a language model, of rows of so many tokens."""
    tokens = {"tokens": jax.ShapeDtypeStruct((1, seq), jnp.int32)}
    return single_pass(
        served.init,
        lambda model, inputs: {"logits": served.forward(model, inputs["tokens"])},
        tokens,
        weights=served.weights,
        name=served.name,
    )


def row_length(served: Served, seq: int | None) -> int:
    """Tokens of a row of a language model.

    Args:
        seq: as asked for; None for `ROW`, or as many as the model takes.
    """
    if seq is None:
        return min(ROW, served.longest)
    if seq > served.longest:
        raise ArgumentError(
            f"a row of {seq} tokens is asked for; {served.name} looks at {served.longest} at most"
            f"\nTry: --seq {served.longest}, or fewer"
        )
    return seq


def named_pass(word: str, seq: int | None = None) -> SinglePass:
    """The pass of what a word names: that of the user's own function, or the logits of a language
    model.
    """
    if ":" in word:
        loaded = models.load(word)
        if isinstance(loaded, UserModel):
            return user_pass(loaded, word, seq)
    from shardlib.serve.loading import named

    served = named(word)
    return logits_pass(served, row_length(served, seq))


# --------------------------------------------------------------------------------------------------
# A single pass as files that need JAX alone.
#
# forward.jax           the program, of `jax.export`: (leaves, inputs by name) -> outputs by name
# weights.safetensors   its leaves
# about.json            their names in order; inputs and outputs, a null where rows may be any
#                       number

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAM, WEIGHTS, ABOUT = "forward.jax", "weights.safetensors", "about.json"


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """The shape of a row of an input or output.

    Attributes:
        dims: of a row.
        dtype: NumPy's name.
    """

    dims: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """The files that were written.

    Attributes:
        name: of the pass.
        inputs, outputs: by name.
        batch: rows that the program takes; None for any number.
    """

    name: str
    inputs: Mapping[str, RowShape]
    outputs: Mapping[str, RowShape]
    batch: int | None


def write_artefact(
    single: SinglePass,
    folder: str | Path,
    *,
    batch: int | None = None,
    platforms: Sequence[str] = PLATFORMS,
) -> Artefact:
    """Writes a pass; see the module.

    Args:
        batch: rows that the program takes; None for any number.
    """
    unknown = sorted(set(platforms) - set(PLATFORMS))
    if unknown or not platforms:
        raise ArgumentError(f"platforms are some of {', '.join(PLATFORMS)}, not {unknown}")
    root = Path(folder)
    leaves_by_path = jax.tree_util.tree_leaves_with_path(single.weights)
    # Keys of random streams are not arrays of a file, and nothing is drawn here.
    plain = {
        path: leaf for path, leaf in enumerate(leaf for _, leaf in leaves_by_path) if not _key(leaf)
    }
    function = _function(single, plain)
    program = _exported(single, function, [_abstract(plain[n]) for n in plain], batch, platforms)
    names = [f"{n}.{path_text(leaves_by_path[n][0])}" for n in plain]
    artefact = Artefact(
        name=single.name,
        inputs={key: _row(shape) for key, shape in single.inputs.items()},
        outputs={key: _row(shape) for key, shape in _outputs(program, batch).items()},
        batch=batch,
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any((root / file).exists() for file in (PROGRAM, WEIGHTS, ABOUT)):
            raise CheckpointError(
                f"{root} holds an artefact already; nothing is overwritten\nTry: an empty folder"
            )
        (root / PROGRAM).write_bytes(program.serialize())
        leaves = (np.asarray(plain[n], order="C") for n in plain)
        save_file(dict(zip(names, leaves, strict=True)), root / WEIGHTS)
        (root / ABOUT).write_text(
            json.dumps(_json(artefact, names, platforms), indent=2) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise CheckpointError(
            f"the artefact could not be written to {root} ({error})\nTry: a folder with more room"
        ) from error
    return artefact


def _key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _function(single: SinglePass, plain: Mapping[int, jax.Array]) -> Tree:
    all_leaves, tree = jax.tree.flatten(single.weights)
    keys = {
        n: np.asarray(jax.random.key_data(leaf)) for n, leaf in enumerate(all_leaves) if _key(leaf)
    }

    def forward(leaves: list[jax.Array], inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        by_number = dict(zip(plain, leaves, strict=True))
        by_number |= {n: jax.random.wrap_key_data(jnp.asarray(data)) for n, data in keys.items()}
        params, state = tree.unflatten([by_number[n] for n in range(len(all_leaves))])
        module = single.model.evaluating(single.model.rebuild(params, state))
        output = single.run(module, inputs)
        return dict(output) if isinstance(output, Mapping) else {"output": output}

    return forward


def _exported(
    single: SinglePass,
    function: Tree,
    leaves: list[jax.ShapeDtypeStruct],
    batch: int | None,
    platforms: Sequence[str],
) -> export.Exported:
    rows = export.symbolic_shape("rows")[0] if batch is None else batch
    inputs = {
        key: jax.ShapeDtypeStruct((rows, *shape.shape[1:]), shape.dtype)
        for key, shape in single.inputs.items()
    }
    try:
        return export.export(jax.jit(function), platforms=tuple(platforms))(leaves, inputs)
    except Exception as error:  # whatever the user's code, or JAX, raises
        hint = (
            "\nTry: a fixed number of rows (--batch 8), where shapes depend on it, as those of"
            " experts do"
        )
        number = "any number of" if batch is None else batch
        raise ModelError(
            f"the pass of {single.name} cannot be traced for {number} rows"
            f" ({fit(printable(str(error)), 300)}){hint if batch is None else ''}"
        ) from error


def _outputs(program: export.Exported, batch: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    rows = program.in_avals[-1].shape[0] if batch is None else batch  # inputs come last
    listed = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.out_avals]
    outputs: dict[str, jax.ShapeDtypeStruct] = program.out_tree.unflatten(listed)
    wrong = [key for key, output in outputs.items() if str(output.shape[:1]) != str((rows,))]
    if wrong:
        raise ModelError(
            f"outputs of a pass have as many rows in their first dim as inputs; {shown(wrong[0])}"
            f" has the shape {outputs[wrong[0]].shape}"
        )
    return outputs


def _row(shape: jax.ShapeDtypeStruct) -> RowShape:
    return RowShape(dims=tuple(shape.shape[1:]), dtype=str(shape.dtype))


def _json(artefact: Artefact, names: list[str], platforms: Sequence[str]) -> JsonObject:
    def shapes(rows: Mapping[str, RowShape]) -> JsonObject:
        return {
            key: {"shape": [artefact.batch, *row.dims], "dtype": row.dtype}
            for key, row in rows.items()
        }

    return {
        "name": artefact.name,
        "inputs": shapes(artefact.inputs),
        "outputs": shapes(artefact.outputs),
        "weights": names,
        "platforms": list(platforms),
        "jax": jax.__version__,
    }
