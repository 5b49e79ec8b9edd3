"""The tokenizer of a folder: `tokenizer.json`, and the template of conversations beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardlib.errors import MissingFileError, MissingPackageError, ModelError
from shardlib.serving.folders.token_bytes import bytes_of
from shardlib.serving.sampling.guides import spelt
from shardlib.untrusted import Limits, fit, printable, read_bytes, read_json
from shardlib.untrusted.json_types import Json, JsonMapping

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Bytes of a `tokenizer.json`, and of a template, at most.
MOST_BYTES, TEMPLATE_BYTES = 1 << 27, 1 << 20
CONFIG = Limits(bytes=1 << 24)


@dataclass(frozen=True, kw_only=True)
class FolderText:
    """A tokenizer of Hugging Face; see `shardlib.serving.text.Text`.

    Attributes:
        tokenizer: of the library `tokenizers`.
        ends: tokens that end an answer.
        template: of conversations, in Jinja; None where the folder has none.
        variables: special tokens as the template calls them.
        file: that the tokenizer was read from; None where there is none.
    """

    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    template: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Tokens of a text; half of a surrogate pair, which JSON can hold, becomes "?".

        Args:
            text: any.
            begin: whether tokens that the model wants in front of every text are put there.
        """
        whole = text.encode("utf-8", "replace").decode()
        return self.tokenizer.encode(whole, add_special_tokens=begin).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special ones.

        Args:
            tokens: of the model; those that the tokenizer does not know are passed over.
        """
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def raw(self, token: int) -> bytes | None:
        """Bytes of a token that may be no text by itself; None where they are not known.

        Args:
            token: of the model.
        """
        return bytes_of(self.tokenizer.id_to_token(token) or "")

    def spelling(self) -> list[bytes] | None:
        """Bytes of each token; None where the file is not known.

        Raises:
            MissingPackageError: the library llguidance, which knows them, is not installed.
        """
        return None if self.file is None else spelt(self.file)


def read_text(folder: Path, ends: frozenset[int] = frozenset()) -> FolderText:
    """The tokenizer of a folder.

    Args:
        folder: holds `tokenizer.json`; `tokenizer_config.json` and `chat_template.jinja` may be
            there.
        ends: tokens that end an answer.

    Raises:
        MissingPackageError: the library `tokenizers` is not installed.
        MissingFileError: there is no such file.
        ModelError: it is no tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingFileError(
            f"{folder} has no tokenizer.json\nTry: AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(folder) of the library transformers, which writes one"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingPackageError(
            "tokenizers of Hugging Face need the library tokenizers\nTry: pip install"
            " 'shardlib[serve]'"
        ) from error
    data = read_bytes(path, "tokenizer", ModelError, limit=MOST_BYTES)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(
            f"{path} is no tokenizer ({fit(printable(str(error)), 300)})\nTry: fetch it again"
        ) from error
    about = _settings(folder)
    return FolderText(
        tokenizer=tokenizer,
        file=path,
        ends=ends,
        template=_template(folder, about),
        variables={
            name: token
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := _token(about.get(name))) is not None
        },
    )


def _settings(folder: Path) -> JsonMapping:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    data = read_json(path, "tokenizer configuration", ModelError, limits=CONFIG)
    if not isinstance(data, Mapping):
        raise ModelError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


def _token(said: Json) -> str | None:
    """A special token: text, or an object with its content."""
    content = said.get("content") if isinstance(said, Mapping) else said
    return content if isinstance(content, str) else None


def _template(folder: Path, about: JsonMapping) -> str | None:
    """The file, as newer versions of `transformers` write it; or the key of the settings, a text or
    a list of named ones.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        data = read_bytes(path, "template of conversations", ModelError, limit=TEMPLATE_BYTES)
        return data.decode("utf-8", "replace")
    said = about.get("chat_template")
    for one in said if isinstance(said, list) else []:
        if isinstance(one, Mapping) and one.get("name") == "default":
            said = one.get("template")
    return said if isinstance(said, str) and len(said) <= TEMPLATE_BYTES else None
