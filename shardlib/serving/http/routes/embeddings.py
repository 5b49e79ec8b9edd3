"""`/v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from functools import partial

import numpy as np
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.asking.prompts import tokens_of
from shardlib.serving.http.bodies.embedding import Embedding
from shardlib.serving.http.catalog import Catalog
from shardlib.serving.http.faults import Fault


def embedding_routes(catalog: Catalog) -> APIRouter:
    """Texts as vectors."""
    router = APIRouter()

    @router.post("/embeddings")
    async def embeddings(body: Embedding) -> Response:
        named = catalog.find(body.model)
        deployed = named.deployed
        if named.adapter:
            raise Fault(
                400,
                f"{named.name} is an adapter, and gives no embeddings; {deployed.name} does",
                code="unsupported_value",
                param="model",
            )
        with deployed.worker.places(1):
            texts = await tokens_of(body.input, deployed, name="input")
            vectors = await _embedded(texts, deployed)
        if body.dimensions not in (None, len(vectors[0])):
            raise Fault(
                400,
                f"embeddings of {deployed.name} have {len(vectors[0])} dimensions",
                code="unsupported_value",
                param="dimensions",
            )
        tokens = sum(map(len, texts))
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body)}
            for index, vector in enumerate(vectors)
        ]
        return JSONResponse(
            {
                "object": "list",
                "model": deployed.name,
                "data": data,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    return router


async def _embedded(texts: Sequence[Sequence[int]], deployed: Deployment) -> list[np.ndarray]:
    """Vectors of some texts."""
    embed = deployed.embedder
    if embed is None:
        raise Fault(
            400, f"{deployed.name} gives no embeddings: it has no hidden states", param="model"
        )
    longest = deployed.worker.engine.capacity.longest
    if (length := max(map(len, texts))) > longest:
        raise Fault(
            400,
            f"{deployed.name} looks at {longest} tokens at most; a text has {length}",
            code="context_length_exceeded",
            param="input",
        )
    jobs = [deployed.worker.call(partial(embed, tokens)) for tokens in texts]
    return [await asyncio.wrap_future(job) for job in jobs]


def _written(vector: np.ndarray, body: Embedding) -> list[float] | str:
    if body.encoding_format == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
