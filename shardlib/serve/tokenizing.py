"""Reads a `tokenizer.json`, and encodes texts with it: a program of `shardlib.untrusted.confined`.

Of the libraries `tokenizers` and llguidance alone. What a folder brings along may write without
end, or take all memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

#: In place of a length: there is no such token.
NONE = 0xFFFFFFFF


def _packed(texts: list[bytes | None]) -> bytes:
    return b"".join(
        struct.pack("<I", NONE) if text is None else struct.pack("<I", len(text)) + text
        for text in texts
    )


def prepare(settings: Mapping[str, Any], body: bytes) -> tuple[Any, Any]:
    """Operations `encode`, `decode` and `spell`, and the tokens: of each its length and text."""
    del settings
    tokenizer = Tokenizer.from_buffer(body)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if size > 1 << 24:
        raise ValueError(f"it has a token with the number {size - 1}")
    names = [tokenizer.id_to_token(token) for token in range(size)]
    special = [
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    ]

    def encode(header: Mapping[str, Any], body: bytes) -> Any:
        """{"begin"}, text -> tokens, int32."""
        tokens = tokenizer.encode(body.decode(), add_special_tokens=header["begin"]).ids
        return {}, struct.pack(f"<{len(tokens)}i", *tokens)

    def decode(header: Mapping[str, Any], body: bytes) -> Any:
        """Tokens, int32 -> text."""
        del header
        tokens = [token for (token,) in struct.iter_unpack("<i", body)]
        return {}, tokenizer.decode(tokens, skip_special_tokens=True).encode("utf-8", "replace")

    def spell(header: Mapping[str, Any], nothing: bytes) -> Any:
        """-> of each token its length and the bytes that it spells; none of special ones."""
        del header, nothing
        from llguidance import LLTokenizer

        speller = LLTokenizer(body.decode())
        spelt = [
            b"" if speller.is_special_token(token) else speller.decode_bytes([token])
            for token in range(speller.vocab_size)
        ]
        return {}, _packed(list(spelt))

    packed = _packed([None if name is None else name.encode("utf-8", "replace") for name in names])
    description = {"special": special, "decoder": json.loads(body).get("decoder")}, packed
    return {"encode": encode, "decode": decode, "spell": spell}, description
