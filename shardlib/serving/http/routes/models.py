"""`/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter

from shardlib.serving.http.routes.catalog import Catalog
from shardlib.untrusted.json_types import JsonObject


def model_routes(catalog: Catalog, started: int) -> APIRouter:
    """The list of models, and each of them.

    Args:
        catalog: of models.
        started: when the server began, seconds since 1970.
    """
    made = APIRouter()

    def described(name: str) -> JsonObject:
        deployed = catalog.find(name)
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "shardlib",
            "max_model_len": deployed.worker.engine.room,
            "version": deployed.worker.version or None,
        }

    @made.get("/models")
    async def list_models() -> JsonObject:
        return {"object": "list", "data": [described(name) for name in catalog]}

    @made.get("/models/{name:path}")
    async def one_model(name: str) -> JsonObject:
        return described(name)

    return made
