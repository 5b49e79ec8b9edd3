"""OpenAI's interface over `shardlib.serve.hosting`, with FastAPI and uvicorn (extra `serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from fastapi import FastAPI

from shardlib import __version__
from shardlib.errors import ArgumentError
from shardlib.serve.hosting import Deployment
from shardlib.serve.http import settings as faults
from shardlib.serve.http.routes import (
    chat_routes,
    completion_routes,
    embedding_routes,
    model_routes,
    status_routes,
)
from shardlib.serve.http.settings import Catalog, Guard, Settings, Watching


def application(deployed: Sequence[Deployment], settings: Settings | None = None) -> FastAPI:
    """The application that serves some models; it starts and stops their engines."""
    limits = settings or Settings()
    names = [deployment.name for deployment in deployed]
    if not names or len(set(names)) < len(names):
        raise ArgumentError(
            f"the models are {', '.join(names) or 'none'}; each has a name of its own\nTry:"
            " NAME=MODEL"
        )
    models: Mapping[str, Deployment] = {deployment.name: deployment for deployment in deployed}
    catalog, started = Catalog(models), int(time.time())
    watching = Watching(models)
    for name, deployment in models.items():
        deployment.worker.watch = watching.of[name]

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(watching.look(models))]
        for deployment in models.values():
            deployment.worker.start(loop)
            tasks.append(loop.create_task(deployment.follow(limits.refresh_seconds)))
        yield
        for task in tasks:
            task.cancel()
        for deployment in models.values():
            await asyncio.to_thread(deployment.worker.stop)
            deployment.renderer.close()

    app = FastAPI(
        title="shardlib", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    faults.install(app)
    for routes in (
        model_routes(catalog, started),
        completion_routes(catalog, limits),
        chat_routes(catalog, limits),
        embedding_routes(catalog),
    ):
        app.include_router(routes, prefix="/v1")
    app.include_router(status_routes(models, watching))
    app.add_middleware(Guard, settings=limits)
    return app
