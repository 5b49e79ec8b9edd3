"""A page for people: load, latency and cache of the last minutes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardlib import __version__
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.watching import Watching
from shardlib.untrusted.json_types import JsonObject

#: It loads nothing but `/figures`.
PAGE = Path(__file__).with_name("page.html").read_text("utf-8")


def figures(models: Mapping[str, Deployment], watching: Watching) -> JsonObject:
    """What the page shows."""
    return {
        "shardlib": __version__,
        "models": [
            {
                "name": name,
                "version": deployed.worker.version,
                "warning": deployed.served.warning,
                "trouble": deployed.worker.trouble,
                "slots": deployed.worker.load.slots,
                "pages": deployed.worker.load.pages,
                "shared": watching.of[name].shared,
                "history": list(watching.of[name].history),
            }
            for name, deployed in models.items()
        ],
    }
