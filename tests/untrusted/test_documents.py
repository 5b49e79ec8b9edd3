"""Plain data of JSON and TOML within limits; each hostile document is refused in a moment, by the
error that was asked for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.errors import MissingFileError, ModelError, PlanError, ShardlibError
from shardlib.untrusted.data import (
    Form,
    Limits,
    construct,
    parse_json,
    parse_toml,
    printable,
    read_json,
    read_toml,
    shown,
)

JSON = {
    "NaN": ('{"a": NaN}', "NaN is not a finite number"),
    "infinity": ("[-Infinity]", "-Infinity is not a finite number"),
    "huge float": ("1e999", "inf is not a finite number"),
    "huge integer": ("1" * 400, "is too large a number"),
    "endless integer": ("1" * 10_000, "Exceeds the limit"),
    "twice": ('{"a": 1, "b": {"a": 2, "a": 3}}', "the key 'a' is there twice"),
    "deep lists": ("[" * 1_000_000, "nested deeper than 64 levels"),
    "deep objects": ('{"a":' * 300_000, "nested deeper than 64 levels"),
    "deep and closed": ("[" * 100 + "]" * 100, "nested deeper than 64 levels"),
    "half a character": ('"\\ud800"', "half of a character"),
    "half a character in a key": ('{"\\udfff": 1}', "half of a character"),
    "no UTF-8": (b'"\xff"', "its bytes are not UTF-8"),
    "empty": ("", "Expecting value"),
    "two": ("{} {}", "Extra data"),
    "open": ('{"a": ', "Expecting value"),
    "control character": ('"a\x1b"', "Invalid control character"),
}
TOML = {
    "NaN": ("a = nan", "nan is not a finite number"),
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


@pytest.mark.parametrize(
    ("parse", "language", "text", "message"),
    [
        pytest.param(parse, language, *case, id=f"{language} {what}")
        for parse, language, cases in ((parse_json, "JSON", JSON), (parse_toml, "TOML", TOML))
        for what, case in cases.items()
    ],
)
def test_documents_that_are_refused(
    parse: Callable[..., Any], language: str, text: Any, message: str
):
    begin = time.monotonic()
    with pytest.raises(PlanError, match=message) as caught:
        parse(text, "the plan", PlanError)
    assert str(caught.value).startswith(f"the plan is not valid {language}: ")
    assert len(str(caught.value)) < 500
    assert time.monotonic() - begin < 60


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
        with pytest.raises(PlanError, match=r"cannot be read|not a file that can be read"):
            read_json(name, "plan", PlanError)
    os.mkfifo(tmp_path / "pipe")  # it would stop the reader for ever
    with pytest.raises(PlanError, match="not a file that can be read"):
        read_toml(tmp_path / "pipe", "plan", PlanError)
    (tmp_path / "large.json").write_text("[" + "1," * 1000 + "1]")
    with pytest.raises(PlanError, match="has more than 100 bytes"):
        read_json(tmp_path / "large.json", "plan", PlanError, limits=Limits(bytes=100))


# Values of plain data, by the annotations of their dataclasses: every field is checked, all
# failures are listed.


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str
    size: int = 1

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ModelError("13 brings bad luck")
        assert self.size != 14


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    rate: float
    flag: bool = False
    words: tuple[str, ...] = ()
    pairs: tuple[tuple[str, int], ...] = ()
    triples: tuple[tuple[str, str, int | None], ...] = ()
    fixed: tuple[int, int] = (0, 0)
    maybe: Inner | None = None
    table: Mapping[str, float] = field(default_factory=dict[str, float])
    list_or_text: tuple[str, ...] | str = ""
    special: complex = 0j
    free: Any = None


FORMS = {complex: Form(plain=tuple[float, float], build=lambda two: complex(*two))}
GOOD = {"inner": {"name": "a"}, "rate": 1}


def read(**more: Any) -> Outer:
    return construct(Outer, {**GOOD, **more}, "the thing", PlanError, forms=FORMS)


def test_what_is_read():
    found = read(
        flag=True,
        words=["a"],
        pairs={"x": 1},
        triples={"x": ["y", None]},
        fixed=[1, 2],
        maybe={"name": "b", "size": 3, "total": 9},
        table={"t": 1.5},
        list_or_text=["p"],
        special=[1, 2.0],
        free={"any": 1},
        unknown=3,
    )
    assert found == Outer(
        inner=Inner(name="a"),
        rate=1,
        flag=True,
        words=("a",),
        pairs=(("x", 1),),
        triples=(("x", "y", None),),
        fixed=(1, 2),
        maybe=Inner(name="b", size=3),
        table={"t": 1.5},
        list_or_text=("p",),
        special=1 + 2j,
        free={"any": 1},
    )
    assert read(pairs=[["x", 1]], maybe=None) == read(pairs={"x": 1})
    assert read(inner=["a", 4]).inner.size == 4
    assert read(inner=Inner(name="q")).inner.name == "q"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rate": "fast"}, "rate is 'fast'; it is a number"),
        ({"rate": True}, "rate is True; it is a number"),
        ({"rate": float("nan")}, "rate is nan; it is a number of a size that there is"),
        (
            {"rate": 10**400},
            "rate is an integer of 1329 bits; it is a number of a size that there is",
        ),
        ({"inner": {}}, "inner.name is missing"),
        ({"inner": 3}, "inner is 3; it is an object"),
        ({"inner": {"name": None}}, "inner.name is None; it is a text"),
        ({"inner": {"name": "a", "size": 1.5}}, "inner.size is 1.5; it is an integer"),
        ({"inner": {"name": "a", "size": 2**63}}, "it is an integer of a size that there is"),
        ({"inner": {"name": "a", "size": 14}}, "the thing is not usable: inner is not usable: "),
        ({"flag": 1}, "flag is 1; it is true or false"),
        ({"words": "abc"}, "words is 'abc'; it is a list"),
        ({"words": {"a": 1}}, "words is {'a': 1}; it is a list"),
        ({"words": ["a", 2]}, "words[1] is 2; it is a text"),
        ({"pairs": {"x": "y"}}, "pairs.x is 'y'; it is an integer"),
        ({"triples": {"x": ["y"]}}, "triples.x is ['y']; it is a list of 2"),
        ({"fixed": [1, 2, 3]}, "fixed is [1, 2, 3]; it is a list of 2"),
        ({"table": []}, "table is []; it is an object"),
        ({"list_or_text": 3}, "list_or_text is 3; it is a text"),
        ({"special": ["a", 1]}, "special[0] is 'a'; it is a number"),
        (
            {"words": ["\x1b[2J" * 3, 1, 2]},
            (
                "the thing is not usable:\n  - words[1] is 1; it is a text\n  - words[2] is 2; it"
                " is a text"
            ),
        ),
    ],
)
def test_what_is_refused(more: dict[str, Any], message: str):
    with pytest.raises(PlanError) as caught:
        read(**more)
    assert message in str(caught.value)


def test_all_failures_are_listed_and_the_message_is_bounded():
    with pytest.raises(PlanError) as caught:
        construct(
            Outer,
            {"inner": {"size": "x" * 10**6}, "words": list(range(10_000)), "\x1b": 1},
            "the thing",
            PlanError,
            forms=FORMS,
            hint="again",
        )
    text = str(caught.value)
    assert text.startswith(
        "the thing is not usable:\n  - inner.name is missing\n  - inner.size is 'xxx"
    )
    assert "and 9983 more" in text
    assert text.endswith("Try: again")
    assert len(text) < 5000


def test_what_a_value_says_of_itself_is_passed_on():
    with pytest.raises(ModelError, match=r"^13 brings bad luck$"):
        construct(
            Outer, {**GOOD, "inner": {"name": "a", "size": 13}}, "it", ModelError, forms=FORMS
        )
    with pytest.raises(
        PlanError, match=r"^it is not usable: inner is not usable: 13 brings bad luck$"
    ):
        construct(Outer, {**GOOD, "inner": {"name": "a", "size": 13}}, "it", PlanError, forms=FORMS)
    with pytest.raises(PlanError, match="rate is -1; it is a number of at least 0"):
        construct(Outer, {**GOOD, "rate": -1}, "it", PlanError, forms=FORMS, least=0)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from([*Outer.__dataclass_fields__, "name", "size"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    data=st.fixed_dictionaries({}, optional=dict.fromkeys(Outer.__dataclass_fields__, PLAIN))
    | PLAIN
)
def test_any_plain_data_is_a_value_or_an_error(data: Any):
    try:
        assert isinstance(construct(Outer, data, "it", PlanError, forms=FORMS), Outer)
    except ShardlibError as error:
        assert isinstance(error, PlanError)
        assert len(str(error)) < 20_000
        assert printable(str(error)) == str(error)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters()))
def test_text_that_is_shown_has_nothing_that_a_terminal_obeys(text: str):
    out = printable(text)
    assert all(one.isprintable() or one in "\n\t\u00a0" for one in out) and printable(out) == out
    assert len(shown(text)) <= 80 and "\n" not in shown(text)
