"""The tokenizer of a folder: `tokenizer.json`, and the template of conversations beside it.

The file is a stranger's, and its reader is native code: it is read, and texts are encoded, in
processes with limits (`tokenizing.py`, `shardlib.untrusted.confined`). Tokens are decoded here by a
table of them, where the file's decoder is one of those that write no more than they are given.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shardlib.errors import (
    ArgumentError,
    MissingFileError,
    MissingPackageError,
    ModelError,
)
from shardlib.serving.folders.token_bytes import bytes_of
from shardlib.serving.sampling.guides import check_installed
from shardlib.untrusted import Limits, read_bytes, read_json
from shardlib.untrusted.confined import ChildLimits, Confined, Fork, RefusedError
from shardlib.untrusted.json_types import Json, JsonMapping

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Bytes of a `tokenizer.json`, and of a template, at most.
MOST_BYTES, TEMPLATE_BYTES = 1 << 27, 1 << 20
CONFIG = Limits(bytes=1 << 24)
#: Of one text, and of reading the file.
LIMITS = ChildLimits(seconds=10.0, memory_bytes=1 << 30, answer_bytes=1 << 28)
#: Bytes of a token in the table that decodes.
LONGEST_TOKEN = 1 << 12
#: In place of a length: there is no such token.
NONE = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class FolderText:
    """A tokenizer of Hugging Face; see `shardlib.serving.text.Text`.

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
    _idle: list[Fork] = field(default_factory=list[Fork], repr=False)

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
            fork = self._idle.pop()
        except IndexError:
            fork = None
        try:
            fork = fork or self.confined.fork()
            data = fork.call(operation, header, body)[1]
        except RefusedError as error:
            if fork is not None and not error.ended:
                self._idle.append(fork)
            raise ArgumentError(f"the tokenizer refuses this: {error}") from error
        self._idle.append(fork)
        return data


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
    """What the tokens of a Hugging Face tokenizer spell, for `Engine.spell`."""
    confined, tokens, _ = _read(tokenizer)
    return FolderText(confined=confined, tokens=tokens).spelling()


def _read(path: Path) -> tuple[Confined, list[str | None], Tokenizer | None]:
    """A file in its process, its tokens, and what decodes them here."""
    if find_spec("tokenizers") is None:
        raise MissingPackageError(
            "tokenizers of Hugging Face need the library tokenizers\nTry: pip install"
            " 'shardlib[serve]'"
        )
    data = read_bytes(path, "tokenizer", ModelError, limit=MOST_BYTES)
    confined = Confined(Path(__file__).with_name("tokenizing.py"), body=data, limits=LIMITS)
    try:
        header, packed = confined.about()
    except RefusedError as error:
        raise ModelError(f"{path} is no tokenizer ({error})\nTry: fetch it again") from error
    tokens = [None if token is None else token.decode() for token in _unpacked(packed)]
    special = header["special"]
    assert isinstance(special, list)
    return confined, tokens, _table(tokens, special, header["decoder"])


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
    """Whether a decoder is of a kind that writes no more than it is given, but for a space for each
    token.
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
    if not path.is_file():
        return {}
    data = read_json(path, "tokenizer configuration", ModelError, limits=CONFIG)
    if not isinstance(data, Mapping):
        raise ModelError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


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
