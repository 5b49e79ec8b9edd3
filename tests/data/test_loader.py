"""Batches on eight simulated devices, and on those of two processes, are those of the dataset."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.data.batches import Loader, TokenDataset, local_rows, placed
from shardlib.data.open import read
from shardlib.errors import BatchError, DataError
from tests.processes import child, free_port

SEQ = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, np.arange(2000, dtype=np.int32))
    return read(path, seq=SEQ)


def abstract(
    spec: PartitionSpec,
    size: int = 16,
    names: Sequence[str] = ("inputs", "targets"),
    seq: int = SEQ,
) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "context"))
    return {
        name: jax.ShapeDtypeStruct((size, seq), np.int32, sharding=NamedSharding(mesh, spec))
        for name in names
    }


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec(),
        PartitionSpec("data"),
        PartitionSpec(("data", "context")),
        PartitionSpec("data", "context"),
        PartitionSpec(None, "data"),
    ],
)
def test_arrays_are_those_of_the_dataset(data: TokenDataset, spec: PartitionSpec):
    batch = abstract(spec)
    with Loader(data, batch, start=3) as loader:
        for expected in range(3, 6):
            step, found = next(loader)
            host = data.batch(expected * 16, 16)
            assert step == expected and loader.position == (expected + 1) * 16
            assert all(
                (np.asarray(found[name]) == host[name]).all()
                and found[name].sharding == batch[name].sharding
                and found[name].dtype == np.int32
                for name in batch
            )


def test_it_ends_where_it_is_asked_to_and_closes(data: TokenDataset):
    assert [step for step, _ in Loader(data, abstract(PartitionSpec()), start=2, stop=5)] == [
        2,
        3,
        4,
    ]
    assert list(Loader(data, abstract(PartitionSpec()), start=2, stop=2)) == []
    with Loader(data, abstract(PartitionSpec())) as loader:
        next(loader)
    assert list(loader) == []
    loader.close()


@pytest.mark.parametrize("start", [0, 3, 5])
def test_a_batch_that_grows_leaves_nothing_out(data: TokenDataset, start: int):
    sizes = [8, 8, 16, 16, 16, 24, 24]
    with Loader(
        data, lambda step: abstract(PartitionSpec("data"), sizes[step]), start=start, stop=7
    ) as loader:
        rows = [row for _, batch in loader for row in np.asarray(batch["inputs"]).tolist()]
    assert rows == data.batch(sum(sizes[:start]), sum(sizes[start:]))[
        "inputs"
    ].tolist() and loader.position == sum(sizes)
    with Loader(data, abstract(PartitionSpec()), start=2, position=5) as loader:
        assert (np.asarray(next(loader)[1]["inputs"]) == data.batch(5, 16)["inputs"]).all()


class Slow:
    """Every batch takes as long as it is said."""

    fields, seq = ("inputs", "targets"), SEQ

    def __init__(self, seconds: float, fails: int = -1) -> None:
        self.seconds, self.fails, self.asked = seconds, fails, list[int]()

    def rows(self, position: int, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        self.asked.append(position)
        time.sleep(self.seconds)
        if position == self.fails:
            raise DataError("the file shrank")
        return {name: np.full((len(rows), SEQ), position, np.int32) for name in self.fields}


def test_threads_hide_a_source_that_is_slower_than_a_step():
    with Loader(Slow(0.4), abstract(PartitionSpec("data")), stop=16, ahead=8) as loader:
        next(loader)
        first = loader.waited_seconds
        for _, _ in loader:
            time.sleep(0.05)
    assert loader.waited_seconds - first < 3  # 15 x 0.35 without threads


def test_it_reads_no_further_than_asked():
    slow = Slow(0.0)
    with Loader(slow, abstract(PartitionSpec("data")), ahead=3) as loader:
        next(loader)
        time.sleep(0.2)
        assert sorted(slow.asked) == [0, 16, 32, 48]


def test_errors_of_threads_come_out_of_next():
    with Loader(Slow(0.0, fails=32), abstract(PartitionSpec("data"))) as loader:
        assert [next(loader)[0], next(loader)[0]] == [0, 1]
        for _ in range(2):
            with pytest.raises(DataError) as caught:
                next(loader)
            assert str(caught.value) == "the file shrank"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            abstract(PartitionSpec(), names=("inputs", "labels")),
            (
                "labels: the data have no such array\nTry: arrays [batch, 8] of inputs (int32),"
                " targets (int32)"
            ),
        ),
        (
            abstract(PartitionSpec(), names=("inputs",), seq=16),
            "inputs: its shape is [16, 16], and examples have 8 tokens",
        ),
        (
            {"inputs": jax.ShapeDtypeStruct((4, SEQ), np.float32)},
            "inputs: its dtype is float32, not int32",
        ),
        (
            {"inputs": jax.ShapeDtypeStruct((4, SEQ), np.int32)},
            "inputs: it has no sharding over devices that are here",
        ),
        ((1, 2), "batches of a loader are arrays by name, and tuple was given"),
    ],
)
def test_batches_that_the_data_do_not_give(data: TokenDataset, batch: object, message: str):
    with pytest.raises(BatchError) as caught:
        Loader(data, batch)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_only_rows_of_own_devices_are_read():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    assert local_rows(NamedSharding(mesh, PartitionSpec("data")), (8, SEQ)).tolist() == list(
        range(8)
    )
    asked = list[np.ndarray]()

    class Asked(Slow):
        def rows(self, position: int, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
            asked.append(np.asarray(rows))
            return super().rows(position, rows)

    placed(Asked(0.0), 0, abstract(PartitionSpec(("data", "context"))))
    assert len(asked) == 1 and asked[0].tolist() == list(range(16))


_PROCESS = """
import json, sys
import numpy as np
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
address, count, number, path, start = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
jax.distributed.initialize(address, count, number)
from shardlib.data.batches import Loader
from shardlib.data.open import read
class Watched:
    def __init__(self, inner): self.inner, self.fields, self.seq, self.read = inner, inner.fields, inner.seq, []
    def rows(self, position, rows):
        self.read += [position + int(row) for row in rows]
        return self.inner.rows(position, rows)
data = Watched(read(path, seq=8))
mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "context"))
batch = {name: jax.ShapeDtypeStruct((16, 8), np.int32, sharding=NamedSharding(mesh, PartitionSpec("data", "context"))) for name in ("inputs", "targets")}
shards = {}
with Loader(data, batch, start=start, stop=start + 3) as loader:
    for step, found in loader:
        for shard in found["inputs"].addressable_shards:
            for row, values in zip(range(16)[shard.index[0]], np.asarray(shard.data).tolist()):
                shards[f"{step} {row} {shard.index[1].start}"] = values
open(f"{path}-{count}-{number}.json", "w").write(json.dumps({"read": sorted(set(data.read)), "shards": shards}))
"""


def processes(count: int, path: Path, start: int) -> Iterator[dict]:
    address = f"localhost:{free_port()}"
    env = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(8 // count),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    running = [
        child(
            "-c", _PROCESS, address, count, number, path, start, env=env, stdout=None, stderr=None
        )
        for number in range(count)
    ]
    for number, process in enumerate(running):
        assert process.wait(timeout=120) == 0
        yield json.loads(Path(f"{path}-{count}-{number}.json").read_text())


@pytest.mark.long
def test_processes_read_their_own_part_and_may_be_others_after_a_stop(tmp_path: Path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(2000, dtype=np.int32))
    data = read(path, seq=SEQ)
    found = list(processes(2, path, 4))
    assert [one["read"] for one in found] == [
        [4 * 16 + step * 16 + row + 8 * number for step in range(3) for row in range(8)]
        for number in range(2)
    ]
    shards = found[0]["shards"] | found[1]["shards"]
    expected = {
        step: data.batch(step * 16, 16)["inputs"] for step in range(4, 7)
    }  # what one process would read from step 0 on
    assert len(shards) == 3 * 16 * 2
    for key, values in shards.items():
        step, row, column = map(int, key.split())
        assert values == expected[step][row, column : column + SEQ // 2].tolist()
