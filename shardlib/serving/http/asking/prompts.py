"""Texts and tokens of a body as prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.asking.checks import fault, refuse_unknown


async def tokens_of(
    prompts: Sequence[str | Sequence[int]], deployed: Deployment, *, name: str = "prompt"
) -> list[list[int]]:
    """Tokens of the prompts of a body; texts are encoded beside the event loop."""
    tokenized: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens = await encoded(prompt, deployed, name=name)
        else:
            tokens = list(prompt)
        if not tokens:
            raise fault(name, f"{name} is empty")
        refuse_unknown(name, tokens, deployed)
        tokenized.append(tokens)
    return tokenized


async def encoded(text: str, deployed: Deployment, *, name: str, begin: bool = True) -> list[int]:
    """Tokens of a text, beside the event loop."""
    try:
        return await asyncio.to_thread(deployed.served.text.encode, text, begin=begin)
    except ArgumentError as error:
        raise fault(name, str(error)) from error
