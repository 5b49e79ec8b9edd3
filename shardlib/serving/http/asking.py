"""From a body to what an engine is asked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.bodies import Chat, Choosing, Completion, Prompt
from shardlib.serving.http.faults import Fault
from shardlib.serving.scheduling.forms import Form
from shardlib.serving.scheduling.requests import Asked
from shardlib.serving.scheduling.settings import Sampling

#: Tokens of an answer to a completion that does not say how many.
MOST = 16
#: The least probability that OpenAI's `top_p: 0` stands for.
LEAST_TOP_P = 1e-6


def refuse_unserved(body: Completion | Chat) -> None:
    """Refuses what is understood and not served, rather than to answer something else.

    Args:
        body: of the request.

    Raises:
        Fault: 400, with the field.
    """
    if isinstance(body, Completion):
        unserved = {
            "suffix": body.suffix,
            "best_of": body.best_of not in (None, body.n or 1),
        }
    else:
        unserved = {
            "tools": body.tools,
            "functions": body.functions,
            "modalities": body.modalities not in (None, ["text"]),
        }
    for name, value in unserved.items():
        if value:
            raise Fault(400, f"{name} is not served here", code="unsupported_value", param=name)


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
            part = await asyncio.to_thread(deployed.served.text.encode, _whole(part))
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


async def conversation(body: Chat, deployed: Deployment) -> list[int]:
    """Tokens of a conversation, up to where the assistant answers.

    Args:
        body: of the request.
        deployed: the model.

    Raises:
        Fault: 400; parts that are no text, or messages that the template refuses.
    """
    messages: list[dict[str, str]] = []
    for number, message in enumerate(body.messages):
        parts = [] if isinstance(message.content, str) else message.content or []
        if any(part.type != "text" or part.text is None for part in parts):
            raise Fault(
                400,
                f"messages[{number}] has a part that is no text",
                code="unsupported_value",
                param="messages",
            )
        text = (
            message.content
            if isinstance(message.content, str)
            else "".join(part.text or "" for part in parts)
        )
        messages.append({"role": _whole(message.role), "content": _whole(text)})
    try:
        text = await asyncio.to_thread(deployed.renderer, messages)
    except ArgumentError as error:
        raise Fault(400, str(error), code="invalid_value", param="messages") from error
    return await asyncio.to_thread(
        deployed.served.text.encode, text, begin=deployed.served.text.template is None
    )


def asked_of(
    body: Completion | Chat, prompts: Sequence[Sequence[int]], deployed: Deployment, *, salt: str
) -> list[Asked]:
    """What the engine is asked: every prompt `n` times, with seeds that follow each other.

    Args:
        body: of the request.
        prompts: tokens of each.
        deployed: the model.
        salt: of the client's prefixes.

    Raises:
        Fault: 400; more tokens than fit, or figures that the engine refuses.
    """
    engine, chat = deployed.worker.engine, isinstance(body, Chat)
    ends = frozenset[int]() if body.ignore_eos else deployed.served.text.ends
    if body.top and not body.logprobs:
        raise Fault(400, "top_logprobs needs logprobs", code="invalid_value", param="top_logprobs")
    found: list[Asked] = []
    try:
        form = _form(body)
        how = _sampling(body, deployed.served.sampling or Sampling(temperature=1.0))
        for prompt in prompts:
            left = engine.room - len(prompt)
            wanted = body.most or (max(left, 1) if chat else MOST)
            if wanted > left:
                raise Fault(
                    400,
                    f"{deployed.name} looks at {engine.room} tokens at most; the prompt has"
                    f" {len(prompt)}, and {wanted} of an answer were asked for",
                    code="context_length_exceeded",
                    param="messages" if chat else "prompt",
                )
            one = Asked(
                prompt=tuple(prompt),
                most=wanted,
                sampling=how,
                stop=ends | frozenset(body.stop_token_ids or ()),
                salt=salt,
                top=body.top,
                least=body.min_tokens or 0,
                scored=body.scored,
                form=form,
            )
            if failures := one.failures(vocab=engine.forward.vocab, room=engine.room):
                raise ArgumentError("; ".join(failures))
            found += [
                replace(one, sampling=replace(how, seed=(how.seed + number) % (1 << 32)))
                for number in range(body.n or 1)
            ]
    except ArgumentError as error:
        raise Fault(400, str(error), code="invalid_value") from error
    return found


def _form(body: Completion | Chat) -> Form | None:
    """The form that an answer is to have.

    Raises:
        ArgumentError: it is none.
        Fault: 400; there are several.
    """
    found: list[Form] = []
    if isinstance(body, Chat) and (said := body.response_format) is not None:
        if said.type == "json_object":
            found.append(Form.schema({"type": "object"}))
        elif said.type == "json_schema":
            if said.json_schema is None:
                raise ArgumentError("response_format has no json_schema")
            found.append(Form.schema(said.json_schema.schema_))
    if (asked := body.structured_outputs) is not None:
        if asked.json_schema is not None:
            schema = asked.json_schema
            text = isinstance(schema, str)
            found.append(Form(kind="json", text=schema) if text else Form.schema(schema))
        if asked.regex is not None:
            found.append(Form.regex(asked.regex))
        if asked.choice is not None:
            found.append(Form.choice(asked.choice))
        if asked.grammar is not None:
            found.append(Form.grammar(asked.grammar))
    if len(found) > 1:
        raise Fault(400, "an answer has one form", code="invalid_value")
    return found[0] if found else None


def _whole(text: str) -> str:
    """A text without halves of surrogate pairs, which JSON can hold."""
    return text.encode("utf-8", "replace").decode()


def _sampling(body: Choosing, default: Sampling) -> Sampling:
    def given(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    bias: dict[int, float] = {}
    for token, value in (body.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise Fault(400, "logit_bias is by tokens", code="invalid_value", param="logit_bias")
        bias[int(token)] = float(value)
    seed = secrets.randbits(32) if body.seed is None else body.seed % (1 << 32)
    return Sampling(
        temperature=given(body.temperature, default.temperature),
        top_p=max(given(body.top_p, default.top_p), LEAST_TOP_P),
        top_k=default.top_k if body.top_k is None else max(body.top_k, 0),
        min_p=given(body.min_p, default.min_p),
        seed=seed,
        frequency=given(body.frequency_penalty, default.frequency),
        presence=given(body.presence_penalty, default.presence),
        repetition=given(body.repetition_penalty, default.repetition),
        bias=bias,
    )
