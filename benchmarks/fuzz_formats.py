"""Every format that shardlib reads: a valid file, and what reads it."""

from __future__ import annotations

import io
import json
import struct
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from benchmarks.environment import TABLES
from shardlib.calibration import figure_names, read_calibration
from shardlib.checkpointing.huggingface import INDEX, Files
from shardlib.checkpointing.store import DamagedError, digest, from_json
from shardlib.cost.framework import FrameworkProfile, framework_profile
from shardlib.cost.roofline import Curve, efficiency_of, vendor_efficiency
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

#: Valid files, and a reader of the bytes of one, which uses what it read.
Prepared = tuple[Sequence[bytes], Callable[[bytes], object]]


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        name: for people.
        prepare: makes what its reader needs in a folder.
        text: "json", "toml", or "" where only bytes are mutated.
        plain: plain data of a valid file, where its structure is mutated.
        framed: a file of the JSON text of mutated data, where that is a part of the file.
    """

    name: str
    prepare: Callable[[Path], Prepared]
    text: str = "json"
    plain: Callable[[bytes], Any] | None = json.loads
    framed: Callable[[bytes], bytes] | None = None


def _toml(data: bytes) -> Any:
    return tomllib.loads(data.decode())


def _json(data: Any) -> bytes:
    return json.dumps(data).encode()


def _file(path: Path, read: Callable[[], object], *valids: bytes) -> Prepared:
    """A reader of what stands at a path; valid is what stands there now, unless more is named."""

    def reads(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return valids or (path.read_bytes(),), reads


def _changed_plan(_: Path) -> Prepared:
    def reads(data: bytes) -> None:
        plan = Plan.from_json(data, changed=True)
        again = Plan.from_json(plan.to_json())
        assert again == plan
        plan.explain(), plan.diff(PLAN), html_report(plan)

    return (PLAN.to_json().encode(),), reads


def _plan(_: Path) -> Prepared:
    def reads(data: bytes) -> None:
        found = Plan.from_json(data)
        assert found == PLAN, "a changed plan was taken"

    return (PLAN.to_json().encode(),), reads


def _card(folder: Path) -> Prepared:
    path = folder / "card.toml"
    valid = (TABLES / "fuzz_card.toml").read_bytes()
    return _file(path, lambda: presets.read(path).parameter_count(), valid)


def _config(folder: Path) -> Prepared:
    path, valids = folder / "config.json", (_json(data) for data, _ in PUBLISHED.values())
    return _file(path, lambda: huggingface.read(path).parameter_count(), *valids)


def _topology(folder: Path) -> Prepared:
    path = folder / "machine.toml"

    def reads() -> None:
        found = topology(str(path))
        efficiency_of(found.chip.name, found.chip.vendor, "xla", dict(found.efficiency))
        assert found.devices > 0 and str(found) and hash(found) is not None

    return _file(path, reads, (TABLES / "fuzz_topology.toml").read_bytes())


def _cluster(folder: Path) -> Prepared:
    path = folder / "devices.toml"

    def reads() -> None:
        for device in cluster(path):
            efficiency_of(device.chip.name, device.chip.vendor, "xla", dict(device.efficiency))

    return _file(path, reads, (TABLES / "fuzz_cluster.toml").read_bytes())


TENSORS = {
    "a": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b.weight": np.ones((3,), np.float16),
}


def _files(folder: Path) -> None:
    with Files(folder=folder) as files:
        for name, (shape, dtype) in files.tensors.items():
            if dtype in ("F32", "F16", "F64") and 0 < np.prod(shape) < 10**6 and len(shape) < 8:
                files.read(name, [np.arange(size) for size in shape])


def _safetensors(folder: Path) -> Prepared:
    valid = safetensors.numpy.save(TENSORS)
    return _file(folder / "model.safetensors", lambda: _files(folder), valid)


def _header(data: bytes) -> Any:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def _with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + safetensors.numpy.save(TENSORS)[-102:]


def _index(folder: Path) -> Prepared:
    for name, tensor in TENSORS.items():
        (folder / f"{name}.safetensors").write_bytes(safetensors.numpy.save({name: tensor}))
    places = {name: f"{name}.safetensors" for name in TENSORS}
    valid = _json({"metadata": {"total_size": 102}, "weight_map": places})
    return _file(folder / INDEX, lambda: _files(folder), valid)


def _store(part: str) -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        text, cache = folder / "text", folder / "cache"
        text.mkdir()
        for number in range(3):
            (text / f"{number}.txt").write_text("a line of text\n" * 40)

        def opened() -> None:
            read(text, seq=8, cache=cache).batch(0, 2)

        opened()
        return _file(next(cache.glob("tokens-*/")) / part, opened)

    return prepare


def _array(folder: Path) -> Prepared:
    saved = []
    for shape in ((400,), (20, 20)):
        stream = io.BytesIO()
        np.save(stream, np.arange(400, dtype=np.uint16).reshape(shape))
        saved.append(stream.getvalue())
    path, cache = folder / "a.npy", folder / "cache"
    return _file(path, lambda: read(path, seq=8, cache=cache).batch(0, 2), *saved)


def _lines(folder: Path) -> Prepared:
    path, cache = folder / "a.jsonl", folder / "cache"
    rows = ({"text": f"line {n} of a text " * 4, "more": [1, {"a": None}]} for n in range(30))
    valid = b"".join(_json(row) + b"\n" for row in rows)
    return _file(path, lambda: read(path, seq=8, cache=cache).batch(0, 2), valid)


def _copy(folder: Path) -> Prepared:
    source, copies = folder / "source", folder / "copies"
    source.mkdir()
    (source / "a.txt").write_text("a text\n" * 50)

    def opened() -> None:
        files = cached(source, copies, limit_bytes=1 << 20)
        files.listing()
        with files.open("a.txt") as stream:
            assert stream.read() == (source / "a.txt").read_bytes()

    opened()
    return _file(next(copies.glob("*.json")), opened)


def _kept(folder: Path) -> Prepared:
    path = folder / "a.npz"

    def opened() -> None:
        kept(path, lambda: {"a": np.arange(100)})

    opened()
    return _file(path, opened)


def _report(_: Path) -> Prepared:
    rows = [
        {"kind": "all-gather", "axes": ["fsdp"], "count": 3, "bytes": 1024, "cause": "a"},
        {"kind": "all-reduce", "axes": ["data"], "count": 1, "bytes": 64},
    ]
    made = {"collectives": rows, "device_bytes": {"peak": 3}}
    valid = _json({"format": 1, "ok": True, "compiled": made})
    return (valid,), lambda data: read_baseline(data, "report.json")


def _about(_: Path) -> Prepared:
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

    return (_json({"digest": digest(content), "content": content}),), reads


def _figures(_: Path) -> Prepared:
    def reads(data: bytes) -> None:
        found = parse_json(data, "figures", PinError)
        if isinstance(found, dict):
            vendor_efficiency("nvidia").with_values(found)

    return (_json(vendor_efficiency("nvidia").to_json()),), reads


def _stack(_: Path) -> Prepared:
    def reads(data: bytes) -> None:
        found = parse_json(data, "stack", PinError)
        if isinstance(found, dict):
            Curve.from_json(found) if "values" in found else FrameworkProfile.from_json(found)

    source = {"sources": ["a paper"], "evidence": {"a": 1}}
    curve = {"chip": "h100", "values": {"matmul": 0.8}, **source, "name": "x"}
    return (_json(framework_profile("megatron-core").to_json()), _json(curve)), reads


def _measured(folder: Path) -> Prepared:
    path = folder / "cpu.json"
    valid = _json({**dict.fromkeys(figure_names(8), 1e9), "cpu": "x", "jax": "0"})
    return _file(path, lambda: read_calibration(path, 8), valid)


FORMATS: tuple[Format, ...] = (
    Format("plan", _plan),
    Format("plan, changed", _changed_plan),
    Format("model card", _card, text="toml", plain=_toml),
    Format("Hugging Face config", _config),
    Format("topology", _topology, text="toml", plain=_toml),
    Format("edge cluster", _cluster, text="toml", plain=_toml),
    Format("safetensors", _safetensors, plain=_header, framed=_with_header),
    Format("safetensors index", _index),
    Format("token store manifest", _store("manifest.json")),
    Format("token store documents", _store("documents.bin"), plain=None),
    Format("token array", _array, plain=None),
    Format("JSON lines", _lines, plain=None),
    Format("copy of a file", _copy),
    Format("kept arrays", _kept, plain=None),
    Format("verification report", _report),
    Format("checkpoint description", _about),
    Format("efficiency figures", _figures),
    Format("framework profile", _stack),
    Format("measured CPU", _measured),
)
