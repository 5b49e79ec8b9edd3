"""Bytes of tokens, as files of Hugging Face write them.

Vocabularies have two ways to write what is no text by itself: a byte by its number, such as
`<0xE2>` (SentencePiece), and a character for each byte (GPT-2).

>>> bytes_of("<0xE2>"), bytes_of("Ã©").decode(), bytes_of("é€")
(b'\\xe2', 'é', None)
"""

from __future__ import annotations

import re
from functools import cache

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
