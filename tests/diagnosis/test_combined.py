"""Rows of collectives that XLA for GPUs combined: each array has its own line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlib.diagnosis.diagnose import why_text

#: Two gathers in one, whose results are taken from its end, and two sums that are laid end to end.
TEXT = """\
HloModule f, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%pack (p.0: f32[1], p.1: f32[512]) -> f32[513] {
  %p.0 = f32[1]{0} parameter(0)
  %p.1 = f32[512]{0} parameter(1)
  ROOT %together = f32[513]{0} concatenate(%p.0, %p.1), dimensions={0}
}

ENTRY %main (x: f32[16,8], y: f32[16,8], s: f32[1], r: f32[512]) -> (f32[64,8], f32[64,8], \
    f32[513]) {
  %x = f32[16,8]{1,0} parameter(0)
  %y = f32[16,8]{1,0} parameter(1)
  %s = f32[1]{0} parameter(2)
  %r = f32[512]{0} parameter(3)
  %start = ((f32[16,8]{1,0}, f32[16,8]{1,0}), (f32[64,8]{1,0}, \
    f32[64,8]{1,0})) all-gather-start(%x, %y), channel_id=1, replica_groups={{0,1,2,3}}, \
    dimensions={0}, \
    metadata={op_name="jit(f)/dot" source_file="m.py" source_line=1}
  %done = (f32[64,8]{1,0}, f32[64,8]{1,0}) all-gather-done(%start), \
    metadata={op_name="jit(f)/dot" source_file="m.py" source_line=1}
  %first = f32[64,8]{1,0} get-tuple-element(%done), index=0, \
    metadata={op_name="jit(f)/dot" source_file="m.py" source_line=1}
  %second = f32[64,8]{1,0} get-tuple-element(%done), index=1, \
    metadata={op_name="jit(f)/dot" source_file="m.py" source_line=2}
  %small = f32[1]{0} negate(%s), metadata={op_name="jit(f)/sum" source_file="m.py" source_line=3}
  %large = f32[512]{0} negate(%r), metadata={op_name="jit(f)/take" source_file="m.py" source_line=4}
  %packed = f32[513]{0} fusion(%small, %large), kind=kLoop, calls=%pack
  %reduced = f32[513]{0} all-reduce(%packed), channel_id=2, replica_groups={{0,1,2,3}}, \
    use_global_device_ids=true, to_apply=%add, \
    metadata={op_name="jit(f)/sum" source_file="m.py" source_line=3}
  ROOT %results = (f32[64,8]{1,0}, f32[64,8]{1,0}, f32[513]{0}) tuple(%first, %second, %reduced)
}
"""


def test_every_array_of_a_combined_collective_has_its_line() -> None:
    rows = why_text(TEXT, mesh="data=4").rows
    found = {(row.kind, row.bytes, row.source.user and row.source.user.line) for row in rows}
    gathered, reduced = 3 / 4 * 64 * 8 * 4, 2 * 3 / 4 * 4
    assert found == {
        ("all-gather", gathered, 1),
        ("all-gather", gathered, 2),
        ("all-reduce", reduced, 3),
        ("all-reduce", 512 * reduced, 4),
    }


def test_rows_that_say_the_same_are_listed_once() -> None:
    diagnosis = why_text(TEXT, mesh="data=4")
    first, second = (row for row in diagnosis.rows if row.kind == "all-gather")
    rows = tuple(
        replace(row, source=first.source) if row is second else row for row in diagnosis.rows
    )
    same = replace(diagnosis, communication=replace(diagnosis.communication, rows=rows))
    for listed, sums in ((diagnosis, ["1.50 KiB  1", "1.50 KiB  1"]), (same, ["3.00 KiB  2"])):
        lines = [line for line in str(listed).splitlines() if "x all-gather over data" in line]
        assert [line.partition(" x ")[0].strip() for line in lines] == sums


def test_a_part_that_is_not_read_fails_the_gate(shell: Any, tmp_path: Path) -> None:
    text = tmp_path / "program.hlo"
    words = ["why", str(text), "--mesh", "data=4", "--max-unexplained", "9"]
    text.write_text(TEXT)
    code, _, _ = shell(*words)
    assert code == 0
    text.write_text(TEXT.replace("f32[", "f99["))
    code, out, _ = shell(*words)
    assert code == 1 and "unknown element type" in out and "no collective" not in out


def test_groups_that_are_no_axes_say_which_mesh_names_them() -> None:
    text = TEXT.replace("{{0,1,2,3}}", "{{0,2},{1,3}}", 1)
    for mesh in (None, "data=4"):
        assert "--mesh x=2,y=2 names them" in str(why_text(text, mesh=mesh))
    assert "--mesh" not in str(why_text(text, mesh="data=2,model=2"))


GATHERED = """\
HloModule f, is_scheduled=true, num_partitions=8

%copied (p: f32[16,2]) -> f32[16,2] {
  %p = f32[16,2]{1,0} parameter(0)
  ROOT %c = f32[16,2]{0,1} copy(%p)
}

ENTRY %main (w: f32[16,2], b: f32[8]) -> f32[16,8] {
  %w = f32[16,2]{1,0} parameter(0), sharding={devices=[2,4]<=[4,2]T(1,0)}, metadata={op_name="w"}
  %b = f32[8]{0} parameter(1), sharding={replicated}, metadata={op_name="b"}
  %copied.1 = f32[16,2]{0,1} fusion(%w), kind=kLoop, calls=%copied
  ROOT %whole = f32[16,8]{1,0} all-gather(%copied.1), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, use_global_device_ids=true
}
"""


def test_a_text_says_how_its_arguments_are_sharded_and_how_cures_are_got() -> None:
    diagnosis = why_text(GATHERED, mesh="data=4,model=2")
    (row,) = diagnosis.rows
    assert row.reason == "`w`, an argument [model, data], is gathered over data"
    assert "cures need the function: shardlib why module:function" in str(diagnosis)
    specs = {value.name: value.spec for value in diagnosis.communication.live}
    assert specs["w"] == (("model",), ("data",))
    assert specs["b"] == ((),)


def test_a_folder_of_dumps_names_its_programs(tmp_path: Path, shell) -> None:
    for name, size in (("module_1.step.cpu_after_optimizations.txt", 2), ("before.txt", 3)):
        (tmp_path / name).write_text(GATHERED * size)
    code, _, err = shell("why", str(tmp_path))
    assert code == 2 and "is a folder\nTry: shardlib why " in err
    assert "module_1.step.cpu_after_optimizations.txt" in err and "before.txt" not in err
