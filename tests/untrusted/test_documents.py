"""Plain data of JSON and TOML within limits; each hostile document is refused in a moment, by the
error that was asked for.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from shardlib.errors import MissingFileError, PlanError, TopologyError
from shardlib.untrusted.data import Limits, parse_json, parse_toml, read_json, read_toml

JSON = {
    "NaN": ('{"a": NaN}', "NaN is no finite number"),
    "infinity": ("[-Infinity]", "-Infinity is no finite number"),
    "huge float": ("1e999", "inf is no finite number"),
    "huge integer": ("1" * 400, "is too large a number"),
    "endless integer": ("1" * 10_000, "Exceeds the limit"),
    "twice": ('{"a": 1, "b": {"a": 2, "a": 3}}', "the key 'a' is there twice"),
    "deep lists": ("[" * 1_000_000, "nested deeper than 64 levels"),
    "deep objects": ('{"a":' * 300_000, "nested deeper than 64 levels"),
    "deep and closed": ("[" * 100 + "]" * 100, "nested deeper than 64 levels"),
    "half a character": ('"\\ud800"', "half of a character"),
    "half a character in a key": ('{"\\udfff": 1}', "half of a character"),
    "no UTF-8": (b'"\xff"', "its bytes are no UTF-8"),
    "empty": ("", "Expecting value"),
    "two": ("{} {}", "Extra data"),
    "open": ('{"a": ', "Expecting value"),
    "control character": ('"a\x1b"', "Invalid control character"),
}
TOML = {
    "NaN": ("a = nan", "nan is no finite number"),
    "a date": ("a = 2024-01-01", "is a date, which nothing here takes"),
    "a key of many parts": ("a" + ".a" * 100_000 + " = 1", "a line has more than 200 dots"),
    "a table of many parts": ("[a" + ".a" * 100_000 + "]", "a line has more than 200 dots"),
    "deep lists": ("a = " + "[" * 100_000, "nested deeper than 64 levels"),
    "deep tables": ("a = " + "{a=" * 50_000, "nested deeper than 64 levels"),
    "deep keys": ("a" + ".a" * 150 + " = 1", "nested deeper than 64 levels"),
    "long": ("#" * (1 << 19), "more than 262,144 bytes"),
    "twice": ("a = 1\na = 2", "Cannot overwrite a value"),
    "open": ("a = ", "Invalid value"),
    "huge integer": ("a = " + "9" * 5000, "Exceeds the limit"),
}


@pytest.mark.parametrize("what", JSON)
def test_json_that_is_refused(what: str):
    text, message = JSON[what]
    begin = time.monotonic()
    with pytest.raises(PlanError, match=message) as caught:
        parse_json(text, "the plan", PlanError)
    assert (
        str(caught.value).startswith("the plan is no JSON: ")
        and len(str(caught.value)) < 500
        and time.monotonic() - begin < 10
    )


@pytest.mark.parametrize("what", TOML)
def test_toml_that_is_refused(what: str):
    text, message = TOML[what]
    begin = time.monotonic()
    with pytest.raises(TopologyError, match=message) as caught:
        parse_toml(text, "the file", TopologyError)
    assert (
        str(caught.value).startswith("the file is no TOML: ")
        and len(str(caught.value)) < 500
        and time.monotonic() - begin < 10
    )


def test_honest_documents_are_what_json_makes_of_them():
    data = {"a": [1, -2.5, 1e22, True, None, "ü\n\U0001f600"], "b": {"": [[]]}}
    assert (
        parse_json(json.dumps(data), "it", PlanError)
        == data
        == parse_json(json.dumps(data, ensure_ascii=False).encode(), "it", PlanError)
    )
    assert parse_toml('a = 1\n[b]\nc = ["x", 2.5]\n', "it", PlanError) == {
        "a": 1,
        "b": {"c": ["x", 2.5]},
    }


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(MissingFileError, match="is not there"):
        read_json(tmp_path / "a.json", "plan", PlanError)
    with pytest.raises(MissingFileError):
        read_json(tmp_path / "a.json" / "b", "plan", PlanError)
    for name in (tmp_path, "a\0b", "/dev/zero"):
        with pytest.raises(PlanError, match=r"cannot be read|no file that can be read"):
            read_json(name, "plan", PlanError)
    os.mkfifo(tmp_path / "pipe")  # it would stop the reader for ever
    with pytest.raises(PlanError, match="no file that can be read"):
        read_toml(tmp_path / "pipe", "plan", PlanError)
    (tmp_path / "large.json").write_text("[" + "1," * 1000 + "1]")
    with pytest.raises(PlanError, match="has more than 100 bytes"):
        read_json(tmp_path / "large.json", "plan", PlanError, limits=Limits(bytes=100))
