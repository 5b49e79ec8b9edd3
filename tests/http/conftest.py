"""One tiny model behind one server, for all tests of the interface."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from shardlib import serving
from shardlib.serving.hosting.deployment import Deployment, deploy
from shardlib.serving.http.app import application
from shardlib.serving.http.server import serving as serve
from shardlib.serving.http.settings import Settings

CARD = """
name = "tiny"
vocab_size = 256
layers = 1
embed = 16
heads = 2
kv_heads = 1
head_dim = 8
mlp = 32
max_seq = 512
compute_dtype = "float32"
"""
#: OpenAI's client asks, and a test may not start the process that says it.
PROCESSOR = platform.uname().processor
TOKENS = ("first-token-of-the-tests", "second-token-of-the-tests")
SETTINGS = Settings(tokens=TOKENS, waiting=4, choices=6, body_seconds=1.0, head_seconds=1.0)
CAPACITY = serving.Capacity(longest=256, slots=4, page=8)


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model card."""
    path = tmp_path_factory.mktemp("card") / "tiny.toml"
    path.write_text(CARD)
    return path


@pytest.fixture(scope="session")
def deployed(card: Path) -> Deployment:
    """The model that is served."""
    return deploy(
        serving.named(str(card)),
        CAPACITY,
        waiting=SETTINGS.waiting,
        buffer=SETTINGS.buffer,
    )


@pytest.fixture(scope="session")
def url(deployed: Deployment) -> Iterator[str]:
    """Where it is."""
    with serve(application([deployed], SETTINGS), SETTINGS) as address:
        yield address


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKENS[0], max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def engine(card: Path) -> serving.Engine:
    """The same model without a server, and without shared pages."""
    return serving.named(str(card)).engine(serving.Capacity(longest=256, slots=1, prefixes=False))
