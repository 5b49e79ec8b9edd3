"""How the server is: `/health`, `/metrics`, and the page for people with its figures."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.page import PAGE, figures
from shardlib.serving.http.watching import Watching


def status_routes(models: Mapping[str, Deployment], watching: Watching) -> APIRouter:
    """What people, Prometheus and whatever starts servers look at."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        trouble = {name: deployment.worker.trouble for name, deployment in models.items()}
        bad = any(trouble.values())
        return JSONResponse(
            {"status": "failed" if bad else "ok", "models": trouble}, 503 if bad else 200
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(watching.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/figures")
    async def page_figures() -> Response:
        return JSONResponse(figures(models, watching))

    @router.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    return router
