"""`shardlib serve` as a process: what it says, what it refuses, how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from shardlib import serve
from shardlib.serve.loading import demonstration
from shardlib.training.run import RunFolder
from tests.processes import child
from tests.serve.http.conftest import TOKENS


@pytest.fixture(scope="module")
def served(
    card: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process that serves the same weights under two names."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("\n".join(TOKENS))
    words = [f"{card}", f"other={card}", "--port", "0", "--token-file", str(tokens), "--slots", "2"]
    words += ["--topology", "cpu:2", "--groups", "2"]
    variables = {"JAX_NUM_CPU_DEVICES": "2"}
    process = child("-m", "shardlib", "serve", *words, "--json", variables=variables)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["models"] == ["tiny", "other"]
        yield ready["url"], process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_a_server_that_is_to_stop_lets_answers_end(served: tuple[str, subprocess.Popen[str]]):
    url, process = served
    with httpx2.Client(timeout=60, headers={"Authorization": f"Bearer {TOKENS[1]}"}) as client:
        assert (
            client.post(f"{url}/completions", json={"prompt": "a", "model": "other"}).status_code
            == 200
        )
        metrics = client.get(url.removesuffix("/v1") + "/metrics").text
        assert 'shardlib_engine_slots{model="tiny"} 4.0' in metrics  # two groups of two
        missing = client.post(f"{url}/completions", json={"prompt": "a"})
        assert missing.status_code == 400 and "there are tiny, other" in missing.text
        body = {"prompt": "a secret prompt", "model": "tiny", "max_tokens": 400, "stream": True}
        with client.stream("POST", f"{url}/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        finish = json.loads(rest[-2][6:])["choices"][0]["finish_reason"]
        assert finish == "length"
        assert process.wait(60) == 0
        with pytest.raises(httpx2.ConnectError):
            client.get(f"{url}/models")
    said = process.stderr.read() if process.stderr else ""
    assert "RANDOM weights" in said and "secret" not in said and "Traceback" not in said


@pytest.mark.long
def test_where_no_model_is_named_a_demonstration_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shardlib.serve.loading.SECONDS", 0.5)
    monkeypatch.setattr("shardlib.serve.loading.SAVE_EVERY", 2)
    monkeypatch.setenv("SHARDLIB_CACHE_DIR", str(tmp_path))
    said: list[str] = []
    place = demonstration(said.append)
    assert place == tmp_path / "demonstration" and "is trained for a minute" in said[0]
    served = serve.named(str(place))
    assert served.version.startswith("step ") and served.newer is not None
    assert not served.warning, "it is not a model with random weights"
    assert demonstration(said.append) == place and len(said) == 2
    (place / "demonstration.txt").unlink()  # as where somebody has stopped it
    before = RunFolder(place).saved()[-1]
    assert demonstration(said.append) == place
    assert f"it stopped at step {before}: a demonstration is trained for a minute" in said[2]
    assert RunFolder(place).saved()[-1] > before and "trained up to step" in said[3]
