"""Repositories of `shardlib export --triton`, served by the real Triton.

    python -m benchmarks serving_triton --numpy1 FOLDER [--out FILE]

The wheel nvidia-pytriton bundles a Triton server with its Python backend; it runs on a CPU, with a
Python that has a shared library of its own version (Debian's python3.11 with libpython3.11 does).
The script writes a classifier and a small Llama of bytes as one repository, parses every
config.pbtxt with tritonclient's schema, starts the server on loopback, and asks it over HTTP and
gRPC: 64 requests from 32 threads for each single pass, texts for the ensemble, and streams of the
language model beside each other. Everything is compared with what shardlib computes here. The
backend of the bundled server (2.51) is older than NumPy 2, and takes no texts with it: the model
that tokenises gets a NumPy 1.26 of its own (--numpy1), and the language model is asked in tokens; a
text that comes while it streams must be refused, and nothing else. The script fails where an answer
differs.
It needs nvidia-pytriton, tritonclient[all], tokenizers and shardlib in one environment.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import pytriton
import tritonclient.grpc as grpc
import tritonclient.http as http
from flax import nnx
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.environment import ROOT, command_line, write
from shardlib import models, serve
from shardlib.serve.artefacts import user_pass
from shardlib.serve.triton.repository import Repository, embedding_pass
from tests.serve.classifier import Classifier, classifier, forward

SEQ, ROWS, MOST = 32, 16, 24
CARD = ROOT / "benchmarks" / "models" / "bytes.toml"
PROMPTS = [f"value_{n} = {n * 7} +" for n in range(6)]


def repository(folder: Path) -> list[str]:
    """Writes both models; returns the names of all."""
    packages = [sysconfig.get_paths()["purelib"], str(ROOT)]
    made = Repository(folder=folder, rows=ROWS, instances=2, python_path=tuple(packages))
    one = user_pass(models.UserModel(**{"name": "classifier", **classifier()}), "classifier")
    capacity = {"longest": 64, "slots": 4, "page": 8}
    served = serve.named(str(CARD))
    return [made.write_pass(one), *made.write_language_model(served, capacity=capacity, seq=SEQ)]


def started(folder: Path, work: Path, ports: tuple[int, int, int]) -> tuple[Any, float]:
    """The server, ready, and the seconds that took; it has four minutes."""
    bundled = Path(str(pytriton.__file__)).parent / "tritonserver"
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    backends = work / "backends"
    shutil.copytree(bundled / "backends" / "python", backends / "python")
    stub = bundled / "python_backend_stubs" / here / "triton_python_backend_stub"
    shutil.copy(stub, backends / "python")
    libraries = Path(str(pytriton.__file__)).parents[1] / "nvidia_pytriton.libs"
    with open(work / "server.log", "w") as log:
        server = subprocess.Popen(
            [
                str(bundled / "bin" / "tritonserver"),
                f"--model-repository={folder}",
                f"--backend-directory={backends}",
                f"--http-port={ports[0]}",
                f"--grpc-port={ports[1]}",
                f"--metrics-port={ports[2]}",
                "--http-address=127.0.0.1",
                "--grpc-address=127.0.0.1",
                "--metrics-address=127.0.0.1",
                "--allow-gpu-metrics=false",
            ],
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(libraries),
                "PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}",  # the stub's library is its own
                "JAX_NUM_CPU_DEVICES": "1",
            },
        )
    client, start = http.InferenceServerClient(f"127.0.0.1:{ports[0]}"), time.monotonic()
    while time.monotonic() - start < 240:
        if server.poll() is not None:
            break
        try:
            if client.is_server_ready():
                return server, time.monotonic() - start
        except Exception:
            pass
        time.sleep(0.5)
    server.kill()
    lines = (work / "server.log").read_text().splitlines()
    raise SystemExit("\n".join([*[one for one in lines if one.startswith("E")][:9], *lines[-9:]]))


def refusal(repository: Path, work: Path, ports: tuple[int, int, int]) -> str:
    """Why the model that tokenises does not load with NumPy 2, from the log of a server of its
    own.
    """
    work.mkdir()
    shutil.copytree(repository / "bytes_tokenize", work / "repository" / "bytes_tokenize")
    try:
        server, _ = started(work / "repository", work, ports)
    except SystemExit as error:
        said = str(error)
        assert "cannot exchange texts with NumPy 2" in said, said
        return said.split("RuntimeError: ")[1].split("\\n")[0]
    server.kill()
    raise AssertionError("a model that cannot read texts has loaded")


def tensor(module: Any, name: str, value: np.ndarray, dtype: str) -> Any:
    """An input of a request."""
    found = module.InferInput(name, list(value.shape), dtype)
    found.set_data_from_numpy(value)
    return found


def many(function: Any, count: int) -> list[Any]:
    """So many requests from 32 threads, at most 20 seconds each."""
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        futures = [pool.submit(function, n) for n in range(count)]
        return [one.result(timeout=20) for one in futures]


def batches(client: Any, name: str) -> dict[str, int]:
    """Rows of a batch -> how many such batches were computed."""
    (stats,) = client.get_inference_statistics(name)["model_stats"]
    return {
        str(one["batch_size"]): int(one["compute_infer"]["count"]) for one in stats["batch_stats"]
    }


def stream(port: int, name: str, given: list[Any], outputs: list[str]) -> list[tuple[int, float]]:
    """The tokens of one request over gRPC, and when each came."""
    got: queue.Queue[Any] = queue.Queue()
    client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
    client.start_stream(callback=lambda result, error: got.put((result, error)))
    client.async_stream_infer(
        name,
        given,
        outputs=[grpc.InferRequestedOutput(one) for one in outputs] or None,
        enable_empty_final_response=True,
    )
    found = list[tuple[int, float]]()
    try:
        while True:
            result, error = got.get(timeout=15)
            if error is not None:
                raise RuntimeError(error.message())
            token = result.as_numpy("token")
            if token is not None:
                found.append((int(token[0]), time.monotonic()))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found
    finally:
        client.stop_stream()


def over_http(port: int, name: str, prompt: str) -> list[int]:
    """The tokens of one request over HTTP, as events of a server."""
    body = {"tokens": list(prompt.encode()), "most": MOST}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/{name}/generate_stream", json.dumps(body).encode()
    )
    with urllib.request.urlopen(asked, timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return [json.loads(line[5:])["token"] for line in lines if line.startswith("data:")]


def streams(port: int, name: str) -> tuple[list[list[int]], list[list[float]], str]:
    """All prompts at once, half of them with no word of outputs: tokens and times of each, and what
    a text was told that came in between.
    """

    def one(n: int) -> Any:
        most = tensor(grpc, "most", np.asarray([MOST], np.int32), "INT32")
        if n == len(PROMPTS):
            text = tensor(grpc, "text", np.asarray([PROMPTS[0].encode()], object), "BYTES")
            try:
                return f"served: {stream(port, name, [text, most], ['token'])}"
            except RuntimeError as error:
                return str(error)
        ids = np.frombuffer(PROMPTS[n].encode(), np.uint8).astype(np.int32)
        given = [tensor(grpc, "tokens", ids, "INT32"), most]
        return stream(port, name, given, ["token"] if n % 2 else [])

    *found, refused = many(one, len(PROMPTS) + 1)
    return [[a for a, _ in row] for row in found], [[b for _, b in row] for row in found], refused


def measured(ports: tuple[int, int, int], names: list[str]) -> dict[str, Any]:
    """Asks for everything, and compares it."""
    at = f"127.0.0.1:{ports[0]}"
    client = http.InferenceServerClient(at)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, 1, 5)).astype(np.float32)
    module = Classifier(nnx.Rngs(7))
    module.eval()

    def asked(n: int, name: str, given: list[tuple[str, np.ndarray, str]], output: str) -> Any:
        """The row of an answer, over HTTP for even n and gRPC for odd ones."""
        module, port = (grpc, ports[1]) if n % 2 else (http, ports[0])
        own = module.InferenceServerClient(f"127.0.0.1:{port}")
        return own.infer(name, [tensor(module, *one) for one in given]).as_numpy(output)[0]

    def classify(n: int) -> np.ndarray:
        return asked(n, "classifier", [("x", rows[n], "FP32")], "probabilities")

    right = np.asarray(forward(module, {"x": rows[:, 0]})["probabilities"])
    wrong = float(np.abs(np.stack(many(classify, 64)) - right).max())

    served = serve.named(str(CARD))
    states = embedding_pass(served, SEQ)
    model = states.model.rebuild(*states.weights)
    tokens, length = np.zeros((len(PROMPTS), SEQ), np.int32), np.zeros((len(PROMPTS), 1), np.int32)
    for n, prompt in enumerate(PROMPTS):
        ids = served.text.encode(prompt)
        tokens[n, : len(ids)], length[n] = ids, len(ids)
    given = {"tokens": tokens, "length": length}
    wanted = np.asarray(states.run(model, jax.tree.map(jnp.asarray, given))["embedding"])

    def embed(n: int) -> np.ndarray:
        row = slice(n // 2 % len(PROMPTS), n // 2 % len(PROMPTS) + 1)
        return asked(
            n, "bytes_states", [(k, v[row], "INT32") for k, v in given.items()], "embedding"
        )

    def of_text(n: int) -> np.ndarray:
        text = np.asarray([[PROMPTS[n // 2 % len(PROMPTS)].encode()]], object)
        return asked(n, "bytes_embedding", [("text", text, "BYTES")], "vector")

    each = wanted[np.arange(48) // 2 % len(PROMPTS)]
    embedded = float(np.abs(np.stack(many(embed, 48)) - each).max())
    normal = each / np.linalg.norm(each, axis=-1, keepdims=True)

    engine = served.engine(serve.Capacity(longest=64, slots=4, page=8))
    answers = engine.generate([served.text.encode(one) for one in PROMPTS], most=MOST)
    said, times, refused = streams(ports[1], "bytes")
    together = sum(
        a[0] < b[-1] and b[0] < a[-1] for i, a in enumerate(times) for b in times[i + 1 :]
    )
    apart = float(min(np.abs(a - b).max() for n, a in enumerate(wanted) for b in wanted[:n]))
    texts = float(np.abs(np.stack(many(of_text, 48)) - normal).max())
    assert max(wrong, embedded, texts) < 1e-5, (wrong, embedded, texts)
    assert said == answers, (said, answers)
    by_http = [over_http(ports[0], "bytes", prompt) for prompt in PROMPTS]
    assert by_http == answers, (by_http, answers)
    assert "cannot exchange texts" in refused, refused
    return {
        "server": client.get_server_metadata()["version"],
        "ready": {name: client.is_model_ready(name) for name in names},
        "classifier": {"largest_difference": wrong, "batches": batches(client, "classifier")},
        "embedding": {
            "largest_difference": embedded,
            "between_prompts_at_least": apart,
            "batches": batches(client, "bytes_states"),
        },
        "ensemble": {"largest_difference": texts},
        "language_model": {
            "requests": len(PROMPTS),
            "tokens_equal": {"grpc": said == answers, "http": by_http == answers},
            "pieces": [len(one) for one in said],
            "pairs_of_streams_that_overlap": together,
            "text_beside_them": refused,
        },
    }


def _numpy1(folder: Path) -> str:
    (found,) = metadata.distributions(name="numpy", path=[str(folder)])
    return found.version


def main() -> None:
    parser = command_line(__doc__, "serving_triton.json")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument(
        "--numpy1", type=Path, required=True, help="pip install --target FOLDER numpy==1.26.4"
    )
    asked = parser.parse_args()
    ports = asked.port, asked.port + 1, asked.port + 2
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        names = repository(work / "repository")
        refused = refusal(work / "repository", work / "alone", ports)
        settings = work / "repository" / "bytes_tokenize" / "1" / "settings.json"
        said = json.loads(settings.read_text())
        said["python_path"].insert(0, str(asked.numpy1))
        settings.write_text(json.dumps(said))
        for name in names:
            config = (work / "repository" / name / "config.pbtxt").read_text()
            parsed = text_format.Parse(config, model_config_pb2.ModelConfig())
            assert parsed.name == name
        server, seconds = started(work / "repository", work, ports)
        try:
            found = measured(ports, names)
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    versions = {name: metadata.version(name) for name in ("nvidia-pytriton", "tritonclient")}
    data = {
        "packages": versions | {"numpy of the model that tokenises": _numpy1(asked.numpy1)},
        "parsed": len(names),
        "ready_seconds": round(seconds, 1),
        "tokenising_with_numpy_2": refused,
        **found,
    }
    write(asked.out, data)
    print(json.dumps(found, indent=1))
