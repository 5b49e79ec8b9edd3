"""Compiles forms of answers, and says which tokens may come next: a program of
`shardlib.untrusted.confined`, of llguidance alone. A fork compiles one form, and serves all answers
that have it.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


def _tokenizer(tokens: list[bytes], ends: list[int]) -> LLTokenizer:
    class Spelt:
        """Tokens as llguidance wants them; texts are never split by it here."""

        eos_token_id, bos_token_id = ends[0], None
        special_token_ids = ends

        def __init__(self) -> None:
            self.tokens = tokens
            self._bytes = {
                token[0]: number for number, token in enumerate(tokens) if len(token) == 1
            }

        def __call__(self, text: bytes | str) -> list[int]:
            data = text.encode() if isinstance(text, str) else text
            return [self._bytes[byte] for byte in data if byte in self._bytes]

    return LLTokenizer(TokenizerWrapper(Spelt()), n_vocab=len(tokens), eos_token=ends)


def _grammar(kind: str, text: str) -> str:
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    if kind == "choice":
        text = "|".join(map(re.escape, json.loads(text)))
    return LLMatcher.grammar_from_regex(text)


def prepare(settings: Mapping[str, Any], body: bytes) -> tuple[Any, Any]:
    """Operations of a model's tokens.

    Args:
        body: of each token its length, uint32, and its bytes.
    """
    tokens, place = list[bytes](), 0
    while place < len(body):
        (size,) = struct.unpack_from("<I", body, place)
        tokens.append(body[place + 4 : place + 4 + size])
        place += 4 + size
    tokenizer = _tokenizer(tokens, list(settings["ends"]))
    compiled = list[LLMatcher]()
    answers = dict[int, LLMatcher]()

    def compile_form(header: Mapping[str, Any], body: bytes) -> Any:
        """{"kind"}, text -> {"seconds"} of a mask, mask of the first token."""
        matcher = LLMatcher(tokenizer, _grammar(header["kind"], body.decode()), log_level=0)
        first, began = matcher.deep_copy(), time.thread_time()
        mask = first.compute_bitmask()  # where no answer meets the form, that shows here
        for tried in (matcher, first):
            if tried.is_error():
                raise ValueError(_reason(tried))
        compiled.append(matcher)
        return {"seconds": time.thread_time() - began}, mask

    def begin(header: Mapping[str, Any], body: bytes) -> None:
        """{"answer": number} -> nothing."""
        del body
        answers[header["answer"]] = compiled[0].deep_copy()

    def end(header: Mapping[str, Any], body: bytes) -> None:
        """{"answer": number} -> nothing."""
        del body
        answers.pop(header["answer"], None)

    def said(header: Mapping[str, Any], began: float, **more: str) -> dict[str, Any]:
        seconds = time.thread_time() - began
        return {"answer": header["answer"], "serial": header["serial"], "seconds": seconds, **more}

    def take(header: Mapping[str, Any], body: bytes) -> Any:
        """{"answer", "tokens", "serial"} -> {"failure"}, mask of the next token; empty where none
        can follow.
        """
        del body
        matcher, began = answers[header["answer"]], time.thread_time()
        for token in header["tokens"]:
            matcher.consume_token(token)
        mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
        failure = _reason(matcher) if matcher.is_error() else ""
        return said(header, began, failure=failure), b"" if failure else mask

    def guess(header: Mapping[str, Any], body: bytes) -> Any:
        """{"answer", "tokens", "serial"} -> masks of what follows each token, up to the first that
        may not come or that none can follow.
        """
        del body
        matcher, began = answers[header["answer"]], time.thread_time()
        masks, done = list[bytes](), 0
        for token in header["tokens"]:
            if matcher.try_consume_tokens([token]) != 1:
                break
            done += 1
            if matcher.is_stopped():
                break
            masks.append(matcher.compute_bitmask())
        if done:
            matcher.rollback(done)
        return said(header, began), b"".join(masks)

    operations = {
        "compile": compile_form,
        "begin": begin,
        "end": end,
        "take": take,
        "guess": guess,
    }
    return operations, ({}, b"")


def _reason(matcher: LLMatcher) -> str:
    """Returns the reason why a matcher has failed, without the state of its parser that follows."""
    text = matcher.get_error().partition("\n<state>")[0][:500]
    return "no answer has it" if text in ("", "NoExtensionBias") else text
