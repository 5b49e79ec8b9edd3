"""Every format that shardlib reads: a valid file, and what reads it."""

from __future__ import annotations

import io
import json
import struct
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from benchmarks.environment import TABLES
from shardlib.calibration import figure_names, read_figures
from shardlib.checkpointing.huggingface import INDEX, Files
from shardlib.checkpointing.store import DamagedError, digest, from_json
from shardlib.cost.framework import FrameworkProfile, framework_profile
from shardlib.cost.roofline import Curve, efficiency, efficiency_of
from shardlib.data.batches import kept
from shardlib.data.open import read
from shardlib.data.sources import cached
from shardlib.errors import CheckpointError, PinError
from shardlib.machines.topology import cluster, topology
from shardlib.models import huggingface, presets
from shardlib.planner.plan import Plan
from shardlib.report.pages import html_report
from shardlib.untrusted.data import parse_json
from shardlib.verification.report import read_baseline
from tests.models.configs import PUBLISHED
from tests.planner.fixture_plan import PLAN


@dataclass(frozen=True, kw_only=True)
class Room:
    """A folder with what the reader of a format needs.

    Attributes:
        valids: valid files.
        read: reads the bytes of one, and uses what it read.
    """

    valids: tuple[bytes, ...]
    read: Callable[[bytes], object]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of files.

    Attributes:
        name: for people.
        prepare: makes a room in a folder.
        text: "json", "toml", or "" where only bytes are mutated.
        plain: plain data of a valid file, where its structure is mutated.
        framed: a file of the JSON text of mutated data, where that is a part of the file.
    """

    name: str
    prepare: Callable[[Path], Room]
    text: str = "json"
    plain: Callable[[bytes], Any] | None = json.loads
    framed: Callable[[bytes], bytes] | None = None


def _toml(data: bytes) -> Any:
    return tomllib.loads(data.decode())


def _through(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Writes the bytes to a file that something reads."""

    def reads(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return reads


def _changed_plan(_: Path) -> Room:
    def reads(data: bytes) -> None:
        plan = Plan.from_json(data, changed=True)
        again = Plan.from_json(plan.to_json())
        assert again == plan
        plan.explain(), plan.diff(PLAN), html_report(plan)

    return Room(valids=(PLAN.to_json().encode(),), read=reads)


def _plan(_: Path) -> Room:
    def reads(data: bytes) -> None:
        found = Plan.from_json(data)
        assert found == PLAN, "a changed plan was taken"

    return Room(valids=(PLAN.to_json().encode(),), read=reads)


CARD = (TABLES / "fuzz_card.toml").read_bytes()
TOPOLOGY = (TABLES / "fuzz_topology.toml").read_bytes()
CLUSTER = (TABLES / "fuzz_cluster.toml").read_bytes()


def _card(folder: Path) -> Room:
    return Room(
        valids=(CARD,),
        read=_through(
            folder / "card.toml", lambda: presets.read(folder / "card.toml").parameter_count()
        ),
    )


def _config(folder: Path) -> Room:
    return Room(
        valids=tuple(json.dumps(data).encode() for data, _ in PUBLISHED.values()),
        read=_through(
            folder / "config.json",
            lambda: huggingface.read(folder / "config.json").parameter_count(),
        ),
    )


def _topology(folder: Path) -> Room:
    def reads() -> None:
        found = topology(str(folder / "machine.toml"))
        efficiency_of(found.chip.name, found.chip.vendor, "xla", dict(found.efficiency))
        assert found.devices > 0 and str(found) and hash(found) is not None

    return Room(valids=(TOPOLOGY,), read=_through(folder / "machine.toml", reads))


def _cluster(folder: Path) -> Room:
    def reads() -> None:
        for one in cluster(folder / "devices.toml"):
            efficiency_of(one.chip.name, one.chip.vendor, "xla", dict(one.efficiency))

    return Room(valids=(CLUSTER,), read=_through(folder / "devices.toml", reads))


TENSORS = {
    "a": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b.weight": np.ones((3,), np.float16),
}


def _files(folder: Path) -> None:
    with Files(folder=folder) as files:
        for name, (shape, dtype) in files.tensors.items():
            if dtype in ("F32", "F16", "F64") and 0 < np.prod(shape) < 10**6 and len(shape) < 8:
                files.read(name, [np.arange(size) for size in shape])


def _safetensors(folder: Path) -> Room:
    return Room(
        valids=(safetensors.numpy.save(TENSORS),),
        read=_through(folder / "model.safetensors", lambda: _files(folder)),
    )


def _header(data: bytes) -> Any:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def _with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + safetensors.numpy.save(TENSORS)[-102:]


def _index(folder: Path) -> Room:
    for name, tensor in TENSORS.items():
        (folder / f"{name}.safetensors").write_bytes(safetensors.numpy.save({name: tensor}))
    valid = json.dumps(
        {
            "metadata": {"total_size": 102},
            "weight_map": {name: f"{name}.safetensors" for name in TENSORS},
        }
    ).encode()
    return Room(valids=(valid,), read=_through(folder / INDEX, lambda: _files(folder)))


def _store(part: str) -> Callable[[Path], Room]:
    def prepare(folder: Path) -> Room:
        text, cache = folder / "text", folder / "cache"
        text.mkdir()
        for number in range(3):
            (text / f"{number}.txt").write_text("a line of text\n" * 40)

        def opened() -> None:
            found = read(text, seq=8, cache=cache)
            found.batch(0, 2)

        opened()
        path = next(cache.glob("tokens-*/")) / part
        valid = path.read_bytes()
        return Room(valids=(valid,), read=_through(path, opened))

    return prepare


def _array(folder: Path) -> Room:
    saved = []
    for shape in ((400,), (20, 20)):
        stream = io.BytesIO()
        np.save(stream, np.arange(400, dtype=np.uint16).reshape(shape))
        saved.append(stream.getvalue())

    def opened() -> None:
        read(folder / "a.npy", seq=8, cache=folder / "cache").batch(0, 2)

    return Room(valids=tuple(saved), read=_through(folder / "a.npy", opened))


def _lines(folder: Path) -> Room:
    cache = folder / "cache"
    valid = b"".join(
        json.dumps({"text": f"line {number} of a text " * 4, "more": [1, {"a": None}]}).encode()
        + b"\n"
        for number in range(30)
    )
    return Room(
        valids=(valid,),
        read=_through(
            folder / "a.jsonl", lambda: read(folder / "a.jsonl", seq=8, cache=cache).batch(0, 2)
        ),
    )


def _copy(folder: Path) -> Room:
    source, copies = folder / "source", folder / "copies"
    source.mkdir()
    (source / "a.txt").write_text("a text\n" * 50)

    def opened() -> None:
        files = cached(source, copies, limit_bytes=1 << 20)
        files.listing()
        with files.open("a.txt") as stream:
            assert stream.read() == (source / "a.txt").read_bytes()

    opened()
    path = next(copies.glob("*.json"))
    return Room(valids=(path.read_bytes(),), read=_through(path, opened))


def _kept(folder: Path) -> Room:
    path = folder / "a.npz"
    kept(path, lambda: {"a": np.arange(100)})
    return Room(
        valids=(path.read_bytes(),),
        read=_through(path, lambda: kept(path, lambda: {"a": np.arange(100)})),
    )


def _report(_: Path) -> Room:
    rows = [
        {"kind": "all-gather", "axes": ["fsdp"], "count": 3, "bytes": 1024, "cause": "a"},
        {"kind": "all-reduce", "axes": ["data"], "count": 1, "bytes": 64},
    ]
    return Room(
        valids=(
            json.dumps(
                {
                    "format": 1,
                    "ok": True,
                    "compiled": {"collectives": rows, "device_bytes": {"peak": 3}},
                }
            ).encode(),
        ),
        read=lambda data: read_baseline(data, "report.json"),
    )


def _about(_: Path) -> Room:
    content = {
        "format": 1,
        "step": 3,
        "time": 1.5,
        "jax": "0",
        "arrays": {"params.a": {"shape": [2, 3], "dtype": "float32", "key": "", "sums": [1, 2]}},
        "plan": json.loads(PLAN.to_json()),
        "extra": {"data": {"position": 3}},
        "metrics": {"loss": 2.5},
    }

    def reads(data: bytes) -> None:
        found = parse_json(data, "the description", CheckpointError)
        if isinstance(found, dict) and "content" in found and len(data) % 2:
            found["digest"] = digest(found["content"])
        try:
            from_json(found).read_plan()
        except DamagedError:
            raise CheckpointError("damaged; who reads checkpoints sets it aside") from None

    return Room(
        valids=(json.dumps({"digest": digest(content), "content": content}).encode(),), read=reads
    )


def _figures(_: Path) -> Room:
    def reads(data: bytes) -> None:
        found = parse_json(data, "figures", PinError)
        if isinstance(found, dict):
            efficiency("nvidia").with_values(found)

    return Room(valids=(json.dumps(efficiency("nvidia").to_json()).encode(),), read=reads)


def _stack(_: Path) -> Room:
    def reads(data: bytes) -> None:
        found = parse_json(data, "stack", PinError)
        if isinstance(found, dict):
            Curve.from_json(found) if "values" in found else FrameworkProfile.from_json(found)

    curve = {
        "chip": "h100",
        "values": {"matmul": 0.8},
        "sources": ["a paper"],
        "evidence": {"a": 1},
        "name": "x",
    }
    return Room(
        valids=(
            json.dumps(framework_profile("megatron-core").to_json()).encode(),
            json.dumps(curve).encode(),
        ),
        read=reads,
    )


def _measured(folder: Path) -> Room:
    path = folder / "cpu.json"
    valid = json.dumps({**dict.fromkeys(figure_names(8), 1e9), "cpu": "x", "jax": "0"}).encode()
    return Room(valids=(valid,), read=_through(path, lambda: read_figures(path, 8)))


FORMATS: tuple[Format, ...] = (
    Format(name="plan", prepare=_plan),
    Format(name="plan, changed", prepare=_changed_plan),
    Format(name="model card", prepare=_card, text="toml", plain=_toml),
    Format(name="Hugging Face config", prepare=_config),
    Format(name="topology", prepare=_topology, text="toml", plain=_toml),
    Format(name="edge cluster", prepare=_cluster, text="toml", plain=_toml),
    Format(name="safetensors", prepare=_safetensors, plain=_header, framed=_with_header),
    Format(name="safetensors index", prepare=_index),
    Format(name="token store manifest", prepare=_store("manifest.json")),
    Format(name="token store documents", prepare=_store("documents.bin"), plain=None),
    Format(name="token array", prepare=_array, plain=None),
    Format(name="JSON lines", prepare=_lines, plain=None),
    Format(name="copy of a file", prepare=_copy),
    Format(name="kept arrays", prepare=_kept, plain=None),
    Format(name="verification report", prepare=_report),
    Format(name="checkpoint description", prepare=_about),
    Format(name="efficiency figures", prepare=_figures),
    Format(name="framework profile", prepare=_stack),
    Format(name="measured CPU", prepare=_measured),
)
