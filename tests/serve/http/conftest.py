"""One tiny model behind one server, for all tests of the interface."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from shardlib import serve as serving
from shardlib.serve.hosting import Deployment, deploy
from shardlib.serve.http.app import application
from shardlib.serve.http.app import serving as serve
from shardlib.serve.http.settings import Settings
from tests.models.configs import tiny
from tests.serve.cards import card as model_card
from tests.serve.hf_folders import write_folder

#: OpenAI's client asks, and a test may not start the process that says it.
PROCESSOR = platform.uname().processor
TOKENS = ("first-token-of-the-tests", "second-token-of-the-tests")
SETTINGS = Settings(tokens=TOKENS, waiting=4, choices=6, body_seconds=3.0, head_seconds=3.0)
CAPACITY = serving.Capacity(longest=256, slots=4, page=8)

#: A template of conversations that writes functions in tags.
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or () %}<tool_call>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}"
    "{% for c in m.tool_calls or () %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model card."""
    path = tmp_path_factory.mktemp("card") / "tiny.toml"
    path.write_text(model_card(vocab=256, layers=1, most=512))
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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    """A folder of Hugging Face, with a template and settings."""
    config = {**tiny("llama-3.1-8b"), "vocab_size": 300, "max_position_embeddings": 768}
    place = write_folder(tmp_path_factory.mktemp("hf") / "tiny-llama", config)
    (place / "chat_template.jinja").write_text(TEMPLATE)
    about = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (place / "tokenizer_config.json").write_text(json.dumps(about))
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 1}
    (place / "generation_config.json").write_text(json.dumps(settings))
    return deploy(serving.named(str(place)), serving.Capacity(longest=768, slots=4, page=32))


@pytest.fixture(scope="session")
def folder_url(folder: Deployment) -> Iterator[str]:
    """Where it is."""
    with serve(application([folder])) as address:
        yield address


@pytest.fixture(scope="session")
def folder_client(folder_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client for it."""
    with openai.OpenAI(base_url=f"{folder_url}/v1", api_key="none", max_retries=0) as made:
        yield made
