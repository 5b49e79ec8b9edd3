"""What is wrong with the fields of a body, each by the name that the body has for it."""

from __future__ import annotations

from collections.abc import Iterable

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.bodies.choosing import Choosing
from shardlib.serving.http.faults import Fault
from shardlib.serving.scheduling.settings import MOST_BIASED


def refuse_unserved(body: Choosing) -> None:
    """Refuses what is understood and not served, rather than to answer something else."""
    for name in body.unserved:
        raise Fault(400, f"{name} is not served here", code="unsupported_value", param=name)


def refuse_unusable(body: Choosing, deployed: Deployment, *, tokens: int, formed: bool) -> None:
    """Refuses figures that are no answer's, and tokens that the model does not have."""
    if body.top and not body.listed:
        raise fault("top_logprobs", "top_logprobs needs logprobs")
    if not tokens and not body.echoes:
        raise fault("max_tokens", "max_tokens is 0, which needs echo: there is nothing to answer")
    if (minimum := body.min_tokens or 0) > tokens:
        limit_name, limit = body.limit
        default = "" if limit else " by default"
        raise fault(
            "min_tokens", f"min_tokens is {minimum}; it is at most {limit_name}, {tokens}{default}"
        )
    if minimum and formed:
        raise fault("min_tokens", "min_tokens is not for answers that have a form")
    biased = body.logit_bias or {}
    if len(biased) > MOST_BIASED:
        raise fault(
            "logit_bias", f"logit_bias has {len(biased)} tokens; {MOST_BIASED} may have one"
        )
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in biased):
        raise fault("logit_bias", "logit_bias is by tokens")
    refuse_unknown("logit_bias", map(int, biased), deployed)
    refuse_unknown("stop_token_ids", body.stop_token_ids or (), deployed)


def refuse_unknown(field: str, tokens: Iterable[int], deployed: Deployment) -> None:
    """Refuses tokens that a model does not have."""
    vocab = deployed.worker.engine.forward.vocab
    if (largest := max(tokens, default=0)) >= vocab:
        raise fault(
            field, f"{field} has the token {largest}; tokens of {deployed.name} are below {vocab}"
        )


def fault(field: str, message: str) -> Fault:
    """What is wrong with a field."""
    return Fault(400, message, code="invalid_value", param=field)
