"""The reader of compiled text: what it reads, and that damage is reported and never guessed
over.
"""

from __future__ import annotations

import gzip
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from shardlib.layout import INNER_AXES, MeshShape
from shardlib.verification.hlo import (
    HloError,
    array_bytes,
    arrays,
    axes_of_groups,
    axes_of_pairs,
    elements,
    parse,
    replica_groups,
    source_target_pairs,
)
from shardlib.verification.traffic import read_traffic

FRAGMENTS = {
    path.name.split(".")[0]: gzip.decompress(path.read_bytes()).decode()
    for path in (Path(__file__).parent / "fragments").glob("*.hlo.gz")
}
MESH = MeshShape(fsdp=4, tensor=2)

KERNEL = """HloModule m, num_partitions=4

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config": {"body": "module {
  %0 = arith.constant 3
}
}
", "note": "a \\" quote and a }"}}, metadata={op_name="kernel[a=\\'b\\']"}
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %g = f32[8]{0} all-reduce(%k), replica_groups={{0,1},{2,3}}, to_apply=%sum
  ROOT %t = (s32[], f32[8]) tuple(%next, %g)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(7)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(2)
  %t = (s32[], f32[8]) tuple(%zero, %x)
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  ROOT %r = f32[8]{0} get-tuple-element(%w), index=1
}
"""


def test_fragments_of_three_compilers_parse_whole():
    assert set(FRAGMENTS) == {"cpu", "tpu", "cuda"}
    for text in FRAGMENTS.values():
        module = parse(text)
        assert module.problems == () and module.partitions == 8 and module.entry
        assert sum(len(c.instructions) for c in module.computations.values()) > 50


def test_raw_braces_and_line_breaks_belong_to_their_instruction():
    module = parse(KERNEL)
    assert module.problems == ()
    body = module.computations["body"]
    assert [i.name for i in body.instructions] == ["p", "x", "k", "i", "one", "next", "g", "t"]
    assert body.by_name["k"].op_name == "kernel[a='b']"
    assert body.by_name["k"].attribute("custom_call_target") == '"tpu_custom_call"'
    assert body.by_name["g"].attribute("replica_groups") == "{{0,1},{2,3}}"


def test_a_loop_without_a_known_trip_count_counts_from_its_start_to_its_bound():
    traffic = read_traffic(KERNEL, MeshShape(data=2, tensor=2))
    assert [(c.kind, c.axes, c.bytes, c.count) for c in traffic.collectives] == [
        ("all-reduce", ("tensor",), 32, 5)
    ]
    assert traffic.problems == ()


def test_a_counter_may_step_by_more_than_one():
    traffic = read_traffic(
        KERNEL.replace("constant(1)", "constant(2)"), MeshShape(data=2, tensor=2)
    )
    assert [c.count for c in traffic.collectives] == [3]  # 2, 4 and 6
    assert traffic.problems == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("constant(7)", "add(%i, %i)"),
        ("direction=LT", "direction=NE"),
        ("constant(1)", "constant(-1)"),
        ("add(%i, %one)", "multiply(%i, %one)"),
        ("tuple(%zero, %x)", "custom-call(%zero, %x)"),
    ],
)
def test_a_loop_that_cannot_be_counted_is_counted_once_and_reported(old: str, new: str):
    traffic = read_traffic(KERNEL.replace(old, new), MeshShape(data=2, tensor=2))
    assert [c.count for c in traffic.collectives] == [1]
    assert traffic.problems == ("the trip count of the loop w is unknown; it is counted once",)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_cut_off_text_is_reported_wherever_it_ends(platform: str):
    text = FRAGMENTS[platform]
    whole = len(text.rstrip())
    numbers = random.Random(0)
    for _ in range(40):
        end = numbers.randrange(whole)
        traffic = read_traffic(text[:end], MESH)
        assert traffic.problems, (
            f"nothing is reported of a text that ends after {end} of {whole} letters"
        )


@pytest.mark.long
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_corrupted_text_never_raises(platform: str):
    text, numbers = FRAGMENTS[platform], random.Random(1)
    for _ in range(30):
        letters = list(text)
        for _ in range(20):
            letters[numbers.randrange(len(letters))] = numbers.choice('{}()"[],=%\n ')
        read_traffic("".join(letters), MESH)


def test_a_missing_computation_and_an_unknown_type_are_reported():
    text = KERNEL.replace("%condition (p", "%other (p").replace(
        "f32[8]{0} all-reduce", "q7[8]{0} all-reduce"
    )
    problems = read_traffic(text, MeshShape(data=2, tensor=2)).problems
    assert "g: unknown element type 'q7'" in problems


@pytest.mark.parametrize("text", ["", "not HLO at all", "HloModule m\n", '{"json": 1}'])
def test_what_is_no_program_is_reported(text: str):
    assert parse(text).problems == ("the text has no ENTRY computation",)


def test_types():
    shape = "((f32[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/bf16[4]{0}), s4[3]{0}, pred[], token[])"
    assert elements(shape) == (
        "(f32[2,3]{1,0:T(8,128)(2,1)S(1)}, bf16[4]{0})",
        "s4[3]{0}",
        "pred[]",
        "token[]",
    )
    assert arrays(shape) == [
        ("f32", (2, 3)),
        ("bf16", (4,)),
        ("s4", (3,)),
        ("pred", ()),
        ("token", ()),
    ]
    assert array_bytes(shape) == 24 + 8 + 2 + 1
    with pytest.raises(HloError, match="unknown element type 'f99'"):
        array_bytes("f99[2]")


# Replica groups: the three forms say the same, and groups along axes are recognised on every mesh
# of eight devices.

SIZES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=6) if np.prod(sizes) == 8]


def along(mesh: MeshShape, axes: tuple[str, ...]) -> np.ndarray:
    """Groups along axes, by grouping devices whose other coordinates agree."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(mesh[axis]) for axis in INNER_AXES))):
        groups.setdefault(
            tuple(i for i, axis in zip(place, INNER_AXES, strict=True) if axis not in axes), []
        ).append(device)
    return np.array(list(groups.values()))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_along_axes_are_recognised_in_every_form(sizes: tuple[int, ...]):
    mesh = MeshShape(zip(INNER_AXES, sizes, strict=True))
    for count in range(1, len(list(mesh)) + 1):
        for axes in itertools.combinations(list(mesh), count):
            groups = along(mesh, axes)
            explicit = (
                "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in groups.tolist()) + "}"
            )
            named = (
                "mesh["
                + ",".join(f"'{axis}'={mesh[axis]}" for axis in INNER_AXES)
                + "] {"
                + ",".join(f"'{axis}'" for axis in axes)
                + "}"
            )
            order = [i for i, axis in enumerate(INNER_AXES) if axis not in axes] + [
                i for i, axis in enumerate(INNER_AXES) if axis in axes
            ]
            iota = f"[{groups.shape[0]},{groups.shape[1]}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
            for text in (explicit, named, iota):
                assert replica_groups(text, 8).tolist() == groups.tolist(), text
            assert axes_of_groups(groups, mesh) == axes


def test_parts_of_an_axis_belong_to_it_and_mixtures_to_nobody():
    mesh = MeshShape(data=2, fsdp=4)
    assert axes_of_groups(replica_groups("mesh['data'=2,'fsdp'=4] {'fsdp':(2)2}", 8), mesh) == (
        "fsdp",
    )
    assert replica_groups("mesh['data'=2,'fsdp'=4] {'fsdp':(1)2}", 8).tolist() == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
    ]
    assert axes_of_groups(np.array([[0, 5], [1, 4], [2, 7], [3, 6]]), mesh) is None
    assert axes_of_groups(replica_groups("{}", 8), mesh) == ("data", "fsdp")


def test_device_numbers_of_a_mesh():
    text = "mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_0'}"
    assert replica_groups(text, 8).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert replica_groups("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", 4).tolist() == [
        [3, 1],
        [2, 0],
    ]


def test_pairs():
    mesh = MeshShape(stage=2, tensor=4)
    ring = source_target_pairs("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", 8)
    assert axes_of_pairs(ring, mesh) == ("tensor",)
    assert axes_of_pairs(source_target_pairs("{{0,4},{4,0},{1,1}}", 8), mesh) == ("stage",)


@pytest.mark.parametrize(
    "text",
    [
        "{{0,1},{2}}",
        "[2,3]<=[8]",
        "[2,4]<=[2,4]T(0,0)",
        "{{0,9},{1,2}}",
        "mesh['a'=2] {'b'}",
        "mesh['a'=3,'b'=3] {'b'}",
        "V9(0,1)",
        "{{}}",
    ],
)
def test_groups_that_make_no_sense_are_refused(text: str):
    with pytest.raises(HloError):
        replica_groups(text, 8)


@pytest.mark.parametrize("text", ["", "{{0,1,2}}", "{{0,8}}"])
def test_pairs_that_make_no_sense_are_refused(text: str):
    with pytest.raises(HloError):
        source_target_pairs(text, 8)
