"""Texts and tokens of a body as prompts."""

from __future__ import annotations

import asyncio

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.bodies.fields import Prompt
from shardlib.serving.http.faults import Fault


async def tokens_of(
    prompt: Prompt, deployed: Deployment, *, name: str = "prompt"
) -> list[list[int]]:
    """Tokens of the prompts of a body; texts are encoded beside the event loop.

    Args:
        prompt: texts, or tokens.
        deployed: the model that they are for.
        name: of the field.

    Raises:
        Fault: 400; tokens that the model does not have, or none.
    """
    parts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    found: list[list[int]] = []
    vocab = deployed.worker.engine.forward.vocab
    for part in parts:
        if isinstance(part, str):
            part = await asyncio.to_thread(deployed.served.text.encode, whole(part))
        tokens: list[int] = list(part)  # pyright: ignore[reportArgumentType]
        if not tokens:
            raise Fault(400, f"{name} is empty", code="invalid_value", param=name)
        if (largest := max(tokens)) >= vocab:
            raise Fault(
                400,
                f"{name} has the token {largest}; tokens of {deployed.name} are below {vocab}",
                code="invalid_value",
                param=name,
            )
        found.append(tokens)
    return found


def whole(text: str) -> str:
    """A text without halves of surrogate pairs, which JSON can hold."""
    return text.encode("utf-8", "replace").decode()
