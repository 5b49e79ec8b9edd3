"""The folder for what is kept between runs: measured prices, prepared data, demonstrations."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def user_cache() -> Path:
    """The user's cache folder of shardlib, or what `SHARDLIB_CACHE_DIR` says."""
    return Path(
        os.environ.get("SHARDLIB_CACHE_DIR")
        or platformdirs.user_cache_dir("shardlib", appauthor=False)
    )
