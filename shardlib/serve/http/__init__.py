"""OpenAI's interface to an engine (extra `serve`).

settings.py   limits, keys, faults, the catalog of models, figures of a running server
bodies.py     requests: read, checked, refused with the reason
app.py        the paths, the answers, the application, and the process that serves
"""

from __future__ import annotations

from importlib.util import find_spec

from shardlib.errors import MissingPackageError

for package in ("fastapi", "prometheus_client", "uvicorn"):
    if find_spec(package) is None:
        raise MissingPackageError(
            f"serving needs the package {package}\nTry: pip install 'shardlib[serve]'"
        )
