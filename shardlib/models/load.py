"""What the word MODEL on the command line means.

A preset ("llama3-8b"), a Hugging Face `config.json`, a TOML model card, or the user's own code as
`package.module:function`. The function takes no arguments and returns a dict, or an object with
these attributes:

- `init`: `nnx.Rngs -> nnx.Module`, or what `shardlib.linen` or `shardlib.tree` return;
- `loss`: `(model, batch) -> scalar` or `-> (scalar, metrics)`;
- `batch`: a pytree of arrays or `jax.ShapeDtypeStruct`;
- optional: `optimizer` (an optax transformation), `batch_axes` (a pytree of tuples of names),
  `name`, `wrt` (what is trained) and `rows` (how the loss depends on the rows of its batch), see
  `shardlib.plan`; and `forward`, `(model, tokens) -> logits`, for serving, see
  `shardlib.plan_serving`; and for `shardlib export`, `outputs`, `(model, batch) -> arrays by name`,
  and `weights` (params, or a seed).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardlib.errors import MissingFileError, ModelError, raise_all
from shardlib.models import card, huggingface
from shardlib.models.config import TransformerConfig
from shardlib.models.encoder_decoder_config import EncoderDecoderConfig
from shardlib.models.presets import PRESETS

#: What a user's function may return.
_KEYS = (
    *("name", "init", "loss", "batch", "optimizer", "batch_axes", "wrt", "rows"),
    *("forward", "outputs", "weights"),
)


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """A model that the user's own function returned; see the module's docstring for the fields."""

    name: str
    init: Any
    loss: Callable[..., Any]
    batch: Any
    optimizer: Any = None
    batch_axes: Any = None
    wrt: Any = None
    rows: str = "prove"
    forward: Callable[..., Any] | None = None
    outputs: Callable[..., Any] | None = None
    weights: Any = None


def load(spec: str) -> TransformerConfig | EncoderDecoderConfig | UserModel:
    """Finds a model."""
    if spec in PRESETS:
        return PRESETS[spec]
    if spec.endswith(".toml"):
        return card.read(spec)
    if spec.endswith(".json"):
        return huggingface.read(spec)
    if Path(spec).is_dir():
        return _folder(Path(spec))
    if ":" in spec and "/" not in spec:
        return _user_model(spec)
    if "/" in spec and not Path(spec).exists():
        raise MissingFileError(
            f"there is no model file or folder {spec}\nTry: a preset (`shardlib models`), a folder"
            " that `shardlib train --run` or Hugging Face wrote, or a config.json"
        )
    near = difflib.get_close_matches(spec, PRESETS, 1, 0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise ModelError(
        f"{spec!r} is no preset, .json or .toml file, or package.module:function{guess} (presets"
        f" are {', '.join(PRESETS)})"
    )


def _folder(path: Path) -> TransformerConfig | EncoderDecoderConfig:
    if (path / "config.json").is_file():
        return huggingface.read(path / "config.json")
    raise MissingFileError(f"the folder {path} holds no config.json")


def _user_model(spec: str) -> UserModel:
    module_name, _, function_name = spec.partition(":")
    function = _find(spec, module_name, function_name)
    required = _required_arguments(function)
    if required:
        raise ModelError(
            f"{spec} must be callable without arguments; it asks for {', '.join(required)}"
        )
    result = function()
    values = (
        result
        if isinstance(result, Mapping)
        else {name: getattr(result, name) for name in _KEYS if hasattr(result, name)}
    )
    failures = [
        f"{name!r} is missing" for name in ("init", "loss", "batch") if values.get(name) is None
    ]
    failures += [
        f"{name!r} is {type(values[name]).__name__}, not callable"
        for name in ("loss", "forward", "outputs")
        if values.get(name) is not None and not callable(values[name])
    ]
    failures += [
        f"{name!r} is no key; keys are {', '.join(_KEYS)}" for name in values if name not in _KEYS
    ]
    if failures:
        raise_all(ModelError, f"what {spec} returned is no model", failures)
    return UserModel(**{"name": spec, **values})


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _find(spec: str, module_name: str, function_name: str) -> Callable[[], Any]:
    """Imports the module, also from the current folder, as `python -m` would."""
    if not module_name or not function_name:
        raise ModelError(f"{spec!r} should be package.module:function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ModelError(
                f"{spec}: there is no module {error.name!r} on the path or in {Path.cwd()}"
            ) from error
        raise ModelError(
            f"{spec}: importing {module_name} needs the module {error.name!r}, which is not"
            " installed"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"{spec}: {_no_function(module, module_name, function_name)}")
    return function


def _no_function(module: ModuleType, module_name: str, name: str) -> str:
    """What a module has in place of a function of a name."""
    if hasattr(module, name):
        kind = type(getattr(module, name)).__name__
        return f"{name!r} of {module_name} is of the type {kind}, and no function"
    near = difflib.get_close_matches(
        name,
        [attribute for attribute in dir(module) if callable(getattr(module, attribute, None))],
        1,
    )
    return f"{module_name} has no function {name!r}" + (
        f"; did you mean {near[0]!r}?" if near else ""
    )
