"""Does the real Triton serve what `shardlib export --triton` writes?

    python benchmarks/serving_triton.py --numpy1 FOLDER [--out FILE]

The wheel nvidia-pytriton bundles a Triton server with its Python backend; it runs on a CPU, with a
Python that has a shared library of its own version (Debian's python3.11 with libpython3.11 does).
The script writes a classifier and a small Llama of bytes as one repository, parses every
config.pbtxt with tritonclient's schema, starts the server on loopback, and asks it over HTTP and
gRPC: 64 requests from 32 threads for each single pass, texts for the ensemble, and streams of the
language model beside each other. Everything is compared with what shardlib computes here. The
backend of the bundled server (2.51) is older than NumPy 2 and crashes on texts with it: the model
that tokenises gets a NumPy 1.26 of its own (--numpy1), and the language model is asked in tokens.
It needs nvidia-pytriton, tritonclient[all], tokenizers and shardlib in one environment.
"""

from __future__ import annotations

import argparse
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
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytriton  # noqa: E402  # pyright: ignore[reportMissingImports]
import tritonclient.grpc as grpc  # noqa: E402  # pyright: ignore[reportMissingImports]
import tritonclient.http as http  # noqa: E402  # pyright: ignore[reportMissingImports]
from flax import nnx  # noqa: E402
from google.protobuf import text_format  # noqa: E402  # pyright: ignore[reportMissingImports]
from tritonclient.grpc import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    model_config_pb2,
)

from benchmarks.environment import RESULTS, write  # noqa: E402
from shardlib import models, serving  # noqa: E402
from shardlib.serving.artefacts.single import embedding_pass, user_pass  # noqa: E402
from shardlib.serving.triton.repository import Repository  # noqa: E402
from tests.serving.classifier import Classifier, classifier, forward  # noqa: E402

SEQ, ROWS, MOST = 32, 16, 24
CARD = """
name = "bytes"
vocab_size = 256
layers = 2
embed = 64
heads = 4
kv_heads = 2
head_dim = 16
mlp = 128
max_seq = 128
compute_dtype = "float32"
"""
PROMPTS = [f"value_{n} = {n * 7} +" for n in range(6)]


def repository(folder: Path, card: Path) -> list[str]:
    """Writes both models; returns the names of all."""
    packages = [sysconfig.get_paths()["purelib"], str(ROOT)]
    made = Repository(folder=folder, rows=ROWS, instances=2, python_path=tuple(packages))
    one = user_pass(models.UserModel(**{"name": "classifier", **classifier()}), "classifier")
    capacity = {"longest": 64, "slots": 4, "page": 8}
    served = serving.named(str(card))
    return [made.write_pass(one), *made.write_language_model(served, capacity=capacity, seq=SEQ)]


def started(folder: Path, work: Path, ports: tuple[int, int, int]) -> tuple[Any, float]:
    """The server, ready, and the seconds that took; it has two minutes."""
    bundled = Path(str(pytriton.__file__)).parent / "tritonserver"
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    backends = work / "backends"
    shutil.copytree(bundled / "backends" / "python", backends / "python")
    stub = bundled / "python_backend_stubs" / here / "triton_python_backend_stub"
    shutil.copy(stub, backends / "python")
    libraries = Path(str(pytriton.__file__)).parents[1] / "nvidia_pytriton.libs"
    log = open(work / "server.log", "w")  # noqa: SIM115
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
    raise SystemExit((work / "server.log").read_text()[-6000:])


def tensor(module: Any, name: str, value: np.ndarray, dtype: str) -> Any:
    """An input of a request."""
    found = module.InferInput(name, list(value.shape), dtype)
    found.set_data_from_numpy(value)
    return found


def many(function: Any, count: int) -> list[Any]:
    """So many requests from 32 threads, at most a minute each."""
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        futures = [pool.submit(function, n) for n in range(count)]
        return [one.result(timeout=20) for one in futures]


def batches(client: Any, name: str) -> dict[str, int]:
    """Rows of a batch -> how many such batches were computed."""
    (stats,) = client.get_inference_statistics(name)["model_stats"]
    return {
        str(one["batch_size"]): int(one["compute_infer"]["count"]) for one in stats["batch_stats"]
    }


def streams(port: int, name: str) -> tuple[list[list[int]], list[list[float]]]:
    """All prompts at once over gRPC: tokens and times of each."""

    def one(n: int) -> tuple[list[int], list[float]]:
        got: queue.Queue[Any] = queue.Queue()
        client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
        client.start_stream(callback=lambda result, error: got.put((result, error)))
        given = [
            tensor(
                grpc,
                "tokens",
                np.frombuffer(PROMPTS[n].encode(), np.uint8).astype(np.int32),
                "INT32",
            ),
            tensor(grpc, "most", np.asarray([MOST], np.int32), "INT32"),
        ]
        client.async_stream_infer(
            name,
            given,
            outputs=[grpc.InferRequestedOutput("token")],
            enable_empty_final_response=True,
        )
        tokens, times = list[int](), list[float]()
        while True:
            result, error = got.get(timeout=15)
            assert error is None, error
            found = result.as_numpy("token")
            if found is not None:
                tokens.append(int(found[0]))
                times.append(time.monotonic())
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
        return tokens, times

    found = many(one, len(PROMPTS))
    return [a for a, _ in found], [b for _, b in found]


def measured(ports: tuple[int, int, int], names: list[str], card: Path) -> dict[str, Any]:
    """Asks for everything, and compares it."""
    at = f"127.0.0.1:{ports[0]}"
    client = http.InferenceServerClient(at)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, 1, 5)).astype(np.float32)
    module = Classifier(nnx.Rngs(7))
    module.eval()

    def classify(n: int) -> np.ndarray:
        own = http.InferenceServerClient(at)
        return own.infer("classifier", [tensor(http, "x", rows[n], "FP32")]).as_numpy(
            "probabilities"
        )[0]

    right = np.asarray(forward(module, {"x": rows[:, 0]})["probabilities"])
    wrong = float(np.abs(np.stack(many(classify, 64)) - right).max())

    served = serving.named(str(card))
    states = embedding_pass(served, SEQ)
    model = states.model.rebuild(*states.weights)
    tokens, length = np.zeros((len(PROMPTS), SEQ), np.int32), np.zeros((len(PROMPTS), 1), np.int32)
    for n, prompt in enumerate(PROMPTS):
        ids = served.text.encode(prompt)
        tokens[n, : len(ids)], length[n] = ids, len(ids)
    given = {"tokens": tokens, "length": length}
    wanted = np.asarray(states.run(model, jax.tree.map(jnp.asarray, given))["embedding"])

    def embed(n: int) -> np.ndarray:
        own = grpc.InferenceServerClient(f"127.0.0.1:{ports[1]}")
        row = slice(n % len(PROMPTS), n % len(PROMPTS) + 1)
        asked = [tensor(grpc, name, one[row], "INT32") for name, one in given.items()]
        return own.infer("bytes_states", asked).as_numpy("embedding")[0]

    def of_text(n: int) -> np.ndarray:
        own = grpc.InferenceServerClient(f"127.0.0.1:{ports[1]}")
        text = np.asarray([[PROMPTS[n % len(PROMPTS)].encode()]], object)
        return own.infer("bytes_embedding", [tensor(grpc, "text", text, "BYTES")]).as_numpy(
            "vector"
        )[0]

    each = wanted[np.arange(48) % len(PROMPTS)]
    embedded = float(np.abs(np.stack(many(embed, 48)) - each).max())
    normal = each / np.linalg.norm(each, axis=-1, keepdims=True)

    engine = served.engine(serving.Capacity(longest=64, slots=4, page=8))
    answers = engine.generate([served.text.encode(one) for one in PROMPTS], most=MOST)
    try:
        said, times = streams(ports[1], "bytes")
    except Exception as error:
        said, times = [[repr(error)]], []  # pyright: ignore[reportAssignmentType]
    together = sum(
        a[0] < b[-1] and b[0] < a[-1] for i, a in enumerate(times) for b in times[i + 1 :]
    )
    try:
        ensemble: Any = float(np.abs(np.stack(many(of_text, 48)) - normal).max())
    except Exception as error:  # the bundled backend may not take texts
        ensemble = f"not served: {error}"[:300]
    return {
        "server": client.get_server_metadata()["version"],
        "ready": {name: client.is_model_ready(name) for name in names},
        "classifier": {"largest_difference": wrong, "batches": batches(client, "classifier")},
        "embedding": {
            "largest_difference": embedded,
            "batches": batches(client, "bytes_states"),
        },
        "ensemble": ensemble,
        "language_model": {
            "requests": len(PROMPTS),
            "tokens_equal": said == answers,
            "pieces": [len(one) for one in said],
            "pairs_of_streams_that_overlap": together,
        },
    }


def main() -> None:
    """Writes a repository, has it served, and asks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "serving_triton.json")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument(
        "--numpy1", type=Path, required=True, help="pip install --target FOLDER numpy==1.26.4"
    )
    asked = parser.parse_args()
    ports = asked.port, asked.port + 1, asked.port + 2
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        card = work / "bytes.toml"
        card.write_text(CARD)
        names = repository(work / "repository", card)
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
            found = measured(ports, names, card)
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    versions = {name: metadata.version(name) for name in ("nvidia-pytriton", "tritonclient")}
    data = {"packages": versions, "parsed": len(names), "ready_seconds": round(seconds, 1), **found}
    write(asked.out, data)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
