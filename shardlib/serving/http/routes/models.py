"""`/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter

from shardlib.serving.http.catalog import Catalog, Named
from shardlib.untrusted.json_types import JsonObject


def model_routes(catalog: Catalog, started: int) -> APIRouter:
    """The list of models, and each of them.

    Args:
        started: when the server began, seconds since 1970.
    """
    router = APIRouter()

    def described(named: Named) -> JsonObject:
        worker = named.deployed.worker
        return {
            "id": named.name,
            "object": "model",
            "created": started,
            "owned_by": "shardlib",
            "max_model_len": worker.engine.room,
            "version": worker.version or None,
            "parent": named.deployed.name if named.adapter else None,  # as vLLM has it
        }

    @router.get("/models")
    async def list_models() -> JsonObject:
        return {"object": "list", "data": [described(named) for named in catalog]}

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> JsonObject:
        return described(catalog.find(name))

    return router
