"""Requests for the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.asking.checks import refuse_unusable
from shardlib.serving.http.asking.forms import form_of
from shardlib.serving.http.asking.sampling import sampling_of
from shardlib.serving.http.bodies.choosing import Choosing
from shardlib.serving.http.catalog import Named
from shardlib.serving.http.faults import Fault
from shardlib.serving.scheduling.requests import Asked
from shardlib.serving.scheduling.settings import Sampling


def asked_of(
    body: Choosing,
    prompts: Sequence[Sequence[int]],
    named: Named,
    *,
    salt: str,
    seconds: float | None = None,
) -> list[Asked]:
    """What the engine is asked: every prompt `n` times, with seeds that follow each other.

    Args:
        seconds: that an answer may take; a body may ask for less. None for any.
    """
    deployed = named.deployed
    engine, text = deployed.worker.engine, deployed.served.text
    requests: list[Asked] = []
    try:
        form = form_of(body, deployed)
        sizes = [_most(body, len(prompt), deployed) for prompt in prompts]
        refuse_unusable(body, deployed, tokens=min(sizes), formed=form is not None)
        sampling = sampling_of(body, deployed.served.sampling or Sampling(temperature=1.0))
        for prompt, size in zip(prompts, sizes, strict=True):
            request = Asked(
                prompt=tuple(prompt),
                most=size,
                sampling=sampling,
                stop=(frozenset() if body.ignore_eos else text.ends)
                | frozenset(body.stop_token_ids or ()),
                salt=salt,
                top=body.top,
                least=body.min_tokens or 0,
                scored=body.scored,
                form=form,
                adapter=named.adapter,
                seconds=min(filter(None, (body.seconds, seconds)), default=None),
            )
            if failures := request.failures(vocab=engine.forward.vocab, room=engine.room):
                raise ArgumentError("; ".join(failures))
            requests += [
                replace(
                    request, sampling=replace(sampling, seed=(sampling.seed + number) % (1 << 32))
                )
                for number in range(body.answers)
            ]
    except ArgumentError as error:
        raise Fault(400, str(error), code="invalid_value") from error
    return requests


async def compile_form(
    requests: Sequence[Asked], deployed: Deployment, stack: contextlib.ExitStack
) -> None:
    """Has the form of answers compiled, beside the event loop and the engine."""
    form, guides = requests[0].form, deployed.worker.engine.guides
    if form is None or guides is None:
        return
    future, give_back = guides.compiled(form)
    stack.callback(give_back)
    try:
        await asyncio.wrap_future(future)
    except ArgumentError as error:
        raise Fault(400, str(error), code="invalid_value") from error


def _most(body: Choosing, size: int, deployed: Deployment) -> int:
    """Tokens of an answer to a prompt of so many tokens, at most."""
    longest = deployed.worker.engine.room
    left = longest - size
    limit = max(left, 1) if body.most is None else body.most
    if limit > left:
        raise Fault(
            400,
            f"{deployed.name} looks at {longest} tokens at most; the prompt has {size}, and {limit}"
            " of an answer were asked for",
            code="context_length_exceeded",
            param=body.prompt_field,
        )
    return limit
