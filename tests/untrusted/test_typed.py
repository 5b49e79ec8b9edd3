"""Values of plain data, by the annotations of their dataclasses: every field is checked, all
failures are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.errors import ModelError, PlanError, ShardlibError
from shardlib.untrusted.data import Form, construct, printable, shown


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
    assert (
        read(pairs=[["x", 1]], maybe=None) == read(pairs={"x": 1})
        and read(inner=["a", 4]).inner.size == 4
        and read(inner=Inner(name="q")).inner.name == "q"
    )


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
    assert (
        text.startswith(
            "the thing is not usable:\n  - inner.name is missing\n  - inner.size is 'xxx"
        )
        and "and 9983 more" in text
        and text.endswith("Try: again")
        and len(text) < 5000
    )


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
        assert (
            isinstance(error, PlanError)
            and len(str(error)) < 20_000
            and printable(str(error)) == str(error)
        )


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters()))
def test_text_that_is_shown_has_nothing_that_a_terminal_obeys(text: str):
    out = printable(text)
    assert all(one.isprintable() or one in "\n\t\u00a0" for one in out) and printable(out) == out
    assert len(shown(text)) <= 80 and "\n" not in shown(text)
