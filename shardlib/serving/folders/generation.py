"""How answers are made unless somebody asks otherwise: `generation_config.json`.

>>> generation({"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6}, "it").stop
frozenset({2, 7})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardlib.errors import ModelError
from shardlib.serving.scheduling.settings import Sampling
from shardlib.untrusted import Limits, read_json, shown
from shardlib.untrusted.json_types import JsonMapping

LIMITS = Limits(bytes=1 << 20)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How answers are made unless somebody asks otherwise.

    Attributes:
        sampling: how each token is chosen.
        stop: tokens that end an answer.
    """

    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()


def read_generation(folder: Path) -> Generation:
    """What a folder says; where it has no `generation_config.json`, the token of its `config.json`
    ends an answer, and the likeliest tokens make it.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        data = read_json(path, "generation configuration", ModelError, limits=LIMITS)
    else:
        path = folder / "config.json"
        config = read_json(path, "model configuration", ModelError, limits=Limits(bytes=1 << 24))
        config = config if isinstance(config, Mapping) else {}
        nested = config.get("text_config")
        inner: JsonMapping = nested if isinstance(nested, Mapping) else {}
        data = {"eos_token_id": config.get("eos_token_id", inner.get("eos_token_id"))}
    if not isinstance(data, Mapping):
        raise ModelError(f"{path} holds {type(data).__name__}, not a JSON object")
    return generation(data, str(path))


def generation(data: JsonMapping, source: str) -> Generation:
    """What the keys of a `generation_config.json` say; those that are not known here are passed
    over.
    """
    ends = data.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    stop = [token for token in listed if isinstance(token, int) and not isinstance(token, bool)]
    if len(stop) < len(listed) or any(token < 0 for token in stop):
        raise ModelError(f"{source} has eos_token_id {shown(ends)}; it is a token, or some")
    if not data.get("do_sample"):
        return Generation(stop=frozenset(stop))
    fields = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p")
        if (value := data.get(name)) is not None
    }
    defaults = {"temperature": 1.0, "top_k": 50}  # those of `transformers`
    try:
        sampling = Sampling(**(defaults | fields))  # type: ignore[arg-type]  (checked in there)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{source} is not usable: {error}") from error
    return Generation(sampling=sampling, stop=frozenset(stop))
