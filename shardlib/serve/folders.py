r"""Folders of Hugging Face: models, adapters, tokenizers and defaults of generation, read and
written.

`generation_config.json` has the defaults of generation:

>>> generation({"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6}, "it").stop
frozenset({2, 7})

`bytes_of` gives the bytes of tokens, as files of Hugging Face write them.

Vocabularies have two ways to write what is not text by itself: a byte by its number, such as
`<0xE2>` (SentencePiece), and a character for each byte (GPT-2).

>>> bytes_of("<0xE2>"), bytes_of("Ã©").decode(), bytes_of("é€")
(b'\xe2', 'é', None)
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from shardlib import models
from shardlib.annotation.model import read
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree, path_text
from shardlib.checkpointing.huggingface import (
    Located,
    load_weights,
    locate,
    names,
    read_config,
    save_weights,
)
from shardlib.checkpointing.tree import named_leaves
from shardlib.errors import (
    ArgumentError,
    CheckpointError,
    MissingFileError,
    MissingPackageError,
    ModelError,
    raise_all,
)
from shardlib.jax_types import KeyPath
from shardlib.models.blocks import MATRICES, LowRank
from shardlib.models.config import DTYPES, TransformerConfig
from shardlib.models.huggingface import CONFIG as huggingface_CONFIG
from shardlib.models.huggingface import blocks
from shardlib.models.presets import described
from shardlib.models.transformer import Transformer
from shardlib.serve.requests import Sampling
from shardlib.serve.sampling import check_installed
from shardlib.serve.served import ByteText, Served
from shardlib.serve.step import both
from shardlib.untrusted.confined import ChildLimits, Confined, RefusedError
from shardlib.untrusted.data import (
    Json,
    JsonMapping,
    JsonObject,
    Limits,
    fit,
    is_integer,
    is_number,
    printable,
    read_bytes,
    read_json,
    shown,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# --------------------------------------------------------------------------------------------------
# Adapters that come in folders of the library PEFT: `adapter_config.json` and
# `adapter_model.safetensors`.
#
#     base = read_folder("Llama-3.1-8B")
#     served, adapters = adapted(base, "Llama-3.1-8B", {"legal": "legal-lora"})

#: What PEFT puts in front of the names of a model's tensors.
START = "base_model.model."
CONFIG = Limits(bytes=1 << 20)
#: Keys of `adapter_config.json` that must have no other value than these, if any.
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (False,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}

#: Ours by dotted path.
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """An adapter as its folder has it.

    Attributes:
        scale: of its products.
        tensors: by name, without what PEFT puts in front and behind: (A [rank, in], B [out, rank]).
    """

    scale: float
    tensors: Mapping[str, tuple[np.ndarray, np.ndarray]]


def adapted(
    served: Served, folder: str | Path, adapters: Mapping[str, str | Path]
) -> tuple[Served, dict[str, Arrays]]:
    """A model with room for adapters, and these, as `Engine.adapt` takes them."""
    config, family = read_config(Path(folder) / "config.json")
    assert served.config is not None
    config = replace(served.config, name=config.name)
    model = read(served.init)
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(model.params).items()}
    places = {
        located.name((layer,)).removesuffix(".weight"): (located, layer)
        for located in locate(config, names(config, family), shapes)
        if located.layers is not None and located.lead == 1 and not located.form.windows
        for layer in range(located.shape[0])
    }
    loaded = {name: read_adapter(Path(place)) for name, place in adapters.items()}
    for name, adapter in loaded.items():
        _check(name, adapter, places)
    used = {places[tensor][0].path for adapter in loaded.values() for tensor in adapter.tensors}
    rank = max(a.shape[0] for adapter in loaded.values() for a, _ in adapter.tensors.values())

    def init(rngs: nnx.Rngs) -> nnx.Module:
        modules = {path.rsplit(".", 1)[1] for path in used}
        return add_low_rank(models.build(config)[0](rngs), rank, modules, rngs)

    adapted_model = read(init)
    low = {
        path: leaf
        for path, leaf in named_leaves(adapted_model.params).items()
        if path.endswith(("_lora.a", "_lora.b"))
    }
    empty = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in low.items()}
    params, state = both(model, served.weights)
    arrays = {**named_leaves(params), **empty}
    leaves = [arrays[path] for path in named_leaves(adapted_model.params)]
    wide = replace(
        served,
        init=init,
        weights=(jax.tree.structure(adapted_model.params).unflatten(leaves), state),
    )
    return wide, {name: _arrays(adapter, places, empty) for name, adapter in loaded.items()}


def read_adapter(folder: Path) -> PeftAdapter:
    """Reads a folder of PEFT."""
    path, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for required in (path, file):
        if not required.is_file():
            raise MissingFileError(
                f"the folder {folder} has no {required.name}\nTry: model.save_pretrained(folder) of"
                " the library peft, which writes one"
            )
    settings = _read_object(path, "adapter configuration", CONFIG)
    failures = [
        f"{key} is {shown(settings[key])}; {shown(allowed[0])} is served"
        for key, allowed in PLAIN.items()
        if key in settings and settings[key] not in allowed
    ]
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not is_integer(rank) or rank < 1:
        failures.append(f"r is {shown(rank)}; it is a whole number above 0")
    if not is_number(alpha):
        failures.append(f"lora_alpha is {shown(alpha)}; it is a number")
    if failures:
        raise_all(ModelError, f"the adapter {folder} cannot be served", failures)
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file} is not a file that can be read ({fit(printable(str(error)), 200)})\nTry: fetch"
            " it again"
        ) from error
    assert is_integer(rank) and is_number(alpha)
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return PeftAdapter(scale=scale, tensors=_paired(file, tensors, rank))


def _paired(
    file: Path, tensors: Mapping[str, np.ndarray], rank: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The two matrices of each product."""
    ends = (".lora_A.weight", ".lora_B.weight")
    bare = {name.removeprefix(START): array for name, array in tensors.items()}
    stems = {name.removesuffix(ends[0]).removesuffix(ends[1]) for name in bare}
    wrong = sorted(stem for stem in stems if any(stem + end not in bare for end in ends))
    pairs = {stem: (bare[stem + ends[0]], bare[stem + ends[1]]) for stem in stems - {*wrong}}
    wrong += [
        stem
        for stem, (a, b) in pairs.items()
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank
    ]
    if wrong or not pairs:
        raise_all(
            ModelError,
            f"{file} is not an adapter of rank {rank}; these are not pairs of matrices",
            wrong[:5] or ["it is empty"],
        )
    return pairs


def _check(name: str, adapter: PeftAdapter, places: Mapping[str, tuple[Located, int]]) -> None:
    """Refuses an adapter of matrices that the model does not have, or that have none."""
    failures: list[str] = []
    for tensor, (a, b) in adapter.tensors.items():
        if tensor not in places or not _dims(places[tensor][0]):
            failures.append(f"{tensor} has no adapter in the model")
            continue
        shape = places[tensor][0].form.file_shape(places[tensor][0].inner)
        if (b.shape[0], a.shape[1]) != shape:
            failures.append(f"{tensor} is {[b.shape[0], a.shape[1]]}; that of the model {[*shape]}")
    if failures:
        raise_all(ModelError, f"the adapter {name!r} does not fit the model", failures[:5])


def _dims(located: Located) -> int:
    """Number of dims of our array that a matrix multiplies; 0 for no matrix that has adapters."""
    *_, place, name = located.path.split(".")
    return MATRICES.get(place, {}).get(name, 0)


def _arrays(
    adapter: PeftAdapter, places: Mapping[str, tuple[Located, int]], empty: Arrays
) -> Arrays:
    """An adapter in our parameters; what it does not change is zero."""
    arrays = {path: array.copy() for path, array in empty.items()}
    for tensor, (a, b) in adapter.tensors.items():
        place, layer = places[tensor]
        into = place.inner[: _dims(place)]
        rank, out = a.shape[0], place.inner[_dims(place) :]
        mine_a, mine_b = arrays[f"{place.path}_lora.a"], arrays[f"{place.path}_lora.b"]
        mine_a[layer, ..., :rank] = a.astype(np.float32).T.reshape(*into, rank)
        mine_b[layer, :rank] = adapter.scale * b.astype(np.float32).T.reshape(rank, *out)
    return arrays


LIMITS = Limits(bytes=1 << 20)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Defaults of how answers are made.

    Attributes:
        sampling: how each token is chosen.
        stop: tokens that end an answer.
    """

    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()


def read_generation(folder: Path) -> Generation:
    """Reads the defaults of a folder; where it has no `generation_config.json`, the token of its
    `config.json` ends an answer, and the likeliest tokens make it.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        data = _read_object(path, "generation configuration", LIMITS)
    else:
        path = folder / "config.json"
        config = read_json(path, "model configuration", ModelError, limits=Limits(bytes=1 << 24))
        config = config if isinstance(config, Mapping) else {}
        nested = config.get("text_config")
        inner: JsonMapping = nested if isinstance(nested, Mapping) else {}
        data = {"eos_token_id": config.get("eos_token_id", inner.get("eos_token_id"))}
    return generation(data, str(path))


def _read_object(path: Path, what: str, limits: Limits) -> JsonMapping:
    data = read_json(path, what, ModelError, limits=limits)
    if not isinstance(data, Mapping):
        raise ModelError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


def generation(data: JsonMapping, source: str) -> Generation:
    """Returns the defaults in the keys of a `generation_config.json`; those that are not known here
    are passed over.
    """
    ends = data.get("eos_token_id")
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    stop = [token for token in listed if is_integer(token)]
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


BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def bytes_of(written: str) -> bytes | None:
    """The bytes of a token; None where it is in neither way."""
    if (byte := BYTE.fullmatch(written)) is not None:
        return bytes.fromhex(byte[1])
    values = [_characters().get(character) for character in written]
    data = [value for value in values if value is not None]
    return bytes(data) if data and len(data) == len(values) else None


@cache
def _characters() -> dict[str, int]:
    """GPT-2's character for each byte: itself where it can be seen, else one from 256 on (the
    function `bytes_to_unicode` of its `encoder.py`).
    """
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = (byte for byte in range(256) if byte not in seen)
    return {chr(byte): byte for byte in seen} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


# --------------------------------------------------------------------------------------------------
# The tokenizer of a folder: `tokenizer.json`, and the template of conversations beside it.
#
# The file is a stranger's, and its reader is native code: it is read, and texts are encoded, in
# processes with limits (`tokenizing.py`, `shardlib.untrusted.confined`). Tokens are decoded here
# by a table of them, where the file's decoder is one of those that write no more than they are
# given.

#: Bytes of a `tokenizer.json`, and of a template, at most.
MOST_BYTES, TEMPLATE_BYTES = 1 << 27, 1 << 20
TEXT_CONFIG = Limits(bytes=1 << 24)
#: Of one text, and of reading the file.
TEXT_LIMITS = ChildLimits(seconds=10.0, memory_bytes=1 << 30, answer_bytes=1 << 28)
#: Bytes of a token in the table that decodes.
LONGEST_TOKEN = 1 << 12
#: In place of a length: there is no such token.
NONE = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class FolderText:
    """A tokenizer of Hugging Face; see `shardlib.serve.served.Text`.

    Attributes:
        confined: reads the file, see `tokenizing.py`.
        tokens: as the vocabulary writes them; None where a number has none.
        table: decodes them; None where only the file's own decoder does.
        ends: tokens that end an answer.
        template: of conversations, in Jinja; None where the folder has none.
        variables: special tokens as the template calls them.
    """

    confined: Confined = field(repr=False)
    tokens: Sequence[str | None] = field(repr=False)
    table: Tokenizer | None = field(default=None, repr=False)
    ends: frozenset[int] = frozenset()
    template: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Tokens of a text; half of a surrogate pair, which JSON can hold, becomes "?"."""
        data = self._call("encode", {"begin": begin}, text.encode("utf-8", "replace"))
        return [token for (token,) in struct.iter_unpack("<i", data)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones."""
        if self.table is not None:
            return self.table.decode(list(tokens), skip_special_tokens=True)
        data = self._call("decode", {}, struct.pack(f"<{len(tokens)}i", *tokens))
        return data.decode("utf-8", "replace")

    def raw(self, token: int) -> bytes | None:
        """Bytes of a token that may be no text by itself; None where they are not known."""
        return bytes_of((self.tokens[token] if token < len(self.tokens) else None) or "")

    def spelling(self) -> list[bytes]:
        """Bytes of each token."""
        check_installed()
        return [spelled or b"" for spelled in _unpacked(self._call("spell", {}, b""))]

    def _call(self, operation: str, header: JsonMapping, body: bytes) -> bytes:
        try:
            return self.confined.call(operation, header, body)[1]
        except RefusedError as error:
            raise ArgumentError(f"the tokenizer refuses this: {error}") from error


def read_text(folder: Path, ends: frozenset[int] = frozenset()) -> FolderText:
    """The tokenizer of a folder."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingFileError(
            f"{folder} has no tokenizer.json\nTry: AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(folder) of the library transformers, which writes one"
        )
    confined, tokens, table = _read(path)
    settings = _settings(folder)
    return FolderText(
        confined=confined,
        tokens=tokens,
        table=table,
        ends=ends,
        template=_template(folder, settings),
        variables={
            name: token
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := _token(settings.get(name))) is not None
        },
    )


def spelt(tokenizer: Path) -> list[bytes]:
    """Lists the bytes of the tokens of a Hugging Face tokenizer, for `Engine.spell`."""
    confined, tokens, _ = _read(tokenizer)
    return FolderText(confined=confined, tokens=tokens).spelling()


def _read(path: Path) -> tuple[Confined, list[str | None], Tokenizer | None]:
    """A file in its process, its tokens, and what decodes them here."""
    _require_tokenizers()
    data = read_bytes(path, "tokenizer", ModelError, limit=MOST_BYTES)
    confined = Confined(Path(__file__).with_name("tokenizing.py"), body=data, limits=TEXT_LIMITS)
    try:
        header, packed = confined.about()
    except RefusedError as error:
        raise ModelError(f"{path} is not a tokenizer ({error})\nTry: fetch it again") from error
    tokens = [None if token is None else token.decode() for token in _unpacked(packed)]
    special = header["special"]
    assert isinstance(special, list)
    return confined, tokens, _table(tokens, special, header["decoder"])


def _require_tokenizers() -> None:
    if find_spec("tokenizers") is None:
        raise MissingPackageError(
            "tokenizers of Hugging Face need the library tokenizers\nTry: pip install"
            " 'shardlib[serve]'"
        )


def _table(tokens: list[str | None], special: list[Json], decoder: Json) -> Tokenizer | None:
    """A tokenizer that has tokens and a decoder, and nothing else of a file; None where there are
    tokens of one text, or the decoder may write more than it is given.
    """
    from tokenizers import Tokenizer

    vocab = {text: token for token, text in enumerate(tokens) if text is not None}
    several = len(vocab) < sum(text is not None for text in tokens)
    longest = max((len(text.encode()) for text in vocab), default=0)
    if several or longest > LONGEST_TOKEN or not _writes_no_more(decoder):
        return None
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = [
        {"id": token, "content": tokens[token], "special": True, **dict.fromkeys(flags, False)}
        for token in special
        if isinstance(token, int) and tokens[token]
    ]
    empty = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
    settings = {
        "version": "1.0",
        **dict.fromkeys(empty),
        "added_tokens": added,
        "decoder": decoder,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": ""},
    }
    return Tokenizer.from_str(json.dumps(settings))


def _writes_no_more(decoder: Json) -> bool:
    """Returns whether a decoder is of a kind that writes no more than it is given, but for a space
    for each token.
    """
    match decoder:
        case None | {"type": "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace" | "WordPiece"}:
            return True
        case {"type": "Strip", "stop": 0}:
            return True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(old) > 0 and len(new.encode()) <= len(old.encode())
        case {"type": "Sequence", "decoders": [*parts]}:
            return len(parts) <= 16 and all(map(_writes_no_more, parts))
    return False


def _unpacked(data: bytes) -> Iterator[bytes | None]:
    """Texts that have their lengths in front of them; see `tokenizing.py`."""
    place = 0
    while place < len(data):
        (size,) = struct.unpack_from("<I", data, place)
        place += 4
        yield None if size == NONE else data[place : place + size]
        place += 0 if size == NONE else size


def _settings(folder: Path) -> JsonMapping:
    path = folder / "tokenizer_config.json"
    return _read_object(path, "tokenizer configuration", TEXT_CONFIG) if path.is_file() else {}


def _token(value: Json) -> str | None:
    """A special token: text, or an object with its content."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _template(folder: Path, settings: JsonMapping) -> str | None:
    """The file, as newer versions of `transformers` write it; or the key of the settings, a text or
    a list of named ones.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        data = read_bytes(path, "template of conversations", ModelError, limit=TEMPLATE_BYTES)
        return data.decode("utf-8", "replace")
    template = settings.get("chat_template")
    for entry in template if isinstance(template, list) else []:
        if isinstance(entry, Mapping) and entry.get("name") == "default":
            template = entry.get("template")
    return template if isinstance(template, str) and len(template) <= TEMPLATE_BYTES else None


# --------------------------------------------------------------------------------------------------
# A folder of Hugging Face, as it is served: `config.json`, safetensors, `tokenizer.json`,
# `generation_config.json`. No code of it is run.
#
#     found = read_folder("Llama-3.1-8B")
#     engine = found.engine(Capacity(longest=4096))
#     engine.generate([found.text.encode("The capital of France is")], most=16)


def is_folder(folder: Path) -> bool:
    """Returns whether a folder is one of Hugging Face."""
    return (folder / "config.json").is_file()


def read_folder(folder: str | Path, *, dtype: str | None = None) -> Served:
    """Reads a folder; its weights are in memory afterwards.

    Args:
        dtype: "float32", "bfloat16" or "float16", of weights and products; by default what
            `config.json` says, or float32.
    """
    root = Path(folder)
    if not is_folder(root):
        raise MissingFileError(f"the folder {root} holds no config.json")
    config, family = read_config(root / "config.json")
    if not isinstance(config, TransformerConfig):
        raise ModelError(
            f"{root} holds a {family}, whose decoder looks at an encoder; only decoders are served"
        )
    kind = _dtype(root, dtype)
    config = replace(config, param_dtype=kind, compute_dtype=kind)
    generation = read_generation(root)
    text = read_text(root, generation.stop)
    model: Model = read(models.build(config)[0])
    return Served(
        name=root.resolve().name,
        init=models.build(config)[0],
        forward=lambda model, tokens: model(tokens),
        hidden=lambda model, tokens: model.hidden(tokens),
        weights=load_weights(root, model, config, family),
        longest=config.max_seq,
        text=text,
        config=config,
        sampling=generation.sampling,
    )


def _dtype(root: Path, dtype: str | None) -> str:
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"dtype is {shown(dtype)}\nTry: one of {', '.join(DTYPES)}")
    if dtype is not None:
        return dtype
    data = read_json(
        root / "config.json", "model configuration", ModelError, limits=huggingface_CONFIG
    )
    nested = data.get("text_config")
    for section in (data, nested if isinstance(nested, Mapping) else {}):
        stored = section.get("dtype", section.get("torch_dtype"))
        if stored is not None:
            if stored not in DTYPES:
                raise ModelError(
                    f"{root / 'config.json'} has dtype {shown(stored)}; known are"
                    f" {', '.join(DTYPES)}\nTry: dtype="
                )
            return stored
    return "float32"


#: Files of a tokenizer that are copied as they are.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
#: Tokens of a model of bytes.
BYTES = 256


def write_folder(
    served: Served, folder: str | Path, *, source: Path | None = None, dtype: str | None = None
) -> tuple[str, ...]:
    """Writes a folder that `transformers` loads, and that is served again.

    Args:
        source: folder that the tokenizer's files are copied from; None where tokens are bytes.
        dtype: of the files, see `save`.
    """
    if served.config is None:
        raise ModelError(
            f"{served.name} is not a reference transformer, so that Hugging Face has no names for"
            " its parameters"
        )
    root, config, weights = Path(folder), served.config, both(read(served.init), served.weights)
    tokenizer: str | None = None
    if isinstance(served.text, ByteText):
        tokenizer = byte_tokenizer()
        config, weights = replace(config, vocab_size=BYTES), _of_bytes(weights, config.tied)
    files = save_weights(weights, root, described(config), dtype=dtype)
    try:
        if tokenizer is not None:
            (root / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
            _write(root / "tokenizer_config.json", _tokenizer_config(config.max_seq))
        for name in _COPIED if source is not None else ():
            assert source is not None
            if (source / name).is_file():
                shutil.copyfile(source / name, root / name)
        _write(root / "generation_config.json", _generation(served))
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer could not be written to {root} ({error})\nTry: a folder with more room"
        ) from error
    return files


def _of_bytes(weights: tuple[Tree, Tree], tied: bool) -> tuple[Tree, Tree]:
    """Without the rows of tokens that no text has."""

    def cut(path: KeyPath, leaf: jax.Array) -> jax.Array:
        name = path_text(path)
        if name == "embedding":
            return leaf[:BYTES]
        return leaf[:, :BYTES] if name == "head" and not tied else leaf

    return jax.tree_util.tree_map_with_path(cut, weights[0]), weights[1]


def _generation(served: Served) -> JsonObject:
    ends = sorted(served.text.ends)
    fields: JsonObject = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    sampling = served.sampling
    if sampling is None or not sampling.temperature:
        return {**fields, "do_sample": False}
    return {
        **fields,
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
    }


def _tokenizer_config(longest: int) -> JsonObject:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }


def _write(path: Path, data: JsonObject) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def byte_tokenizer() -> str:
    """A `tokenizer.json` with a token for every byte of UTF-8."""
    _require_tokenizers()
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE(vocab=_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str(pretty=True)


def add_low_rank(
    model: Transformer, rank: int, matrices: Collection[str], rngs: nnx.Rngs
) -> Transformer:
    """Gives some matrices of a transformer an adapter, in all layers that have them."""
    for block in blocks(model):
        for place, matrix_dims in MATRICES.items():
            module = getattr(block, place, None)
            for name, dims in matrix_dims.items():
                if name in matrices and hasattr(module, name):
                    low = LowRank(getattr(module, name), dims, rank, rngs)
                    setattr(module, f"{name}_lora", low)
    return model
