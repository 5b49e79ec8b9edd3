"""From words to what is served, and from tokens to text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib import serve
from shardlib.errors import MissingFileError, ModelError
from shardlib.serve.served import ByteText, Pieces
from tests.serve.cards import card

CARD = card(vocab=300, layers=1)


@pytest.mark.unit
@given(st.one_of(st.binary(max_size=120), st.text(max_size=60).map(str.encode)))
def test_pieces_are_the_text(answer: bytes) -> None:
    pieces = Pieces(ByteText())
    found = [pieces.add(byte) for byte in answer]
    assert "".join([*found, pieces.end()]) == answer.decode("utf-8", "replace")


@pytest.mark.unit
def test_a_character_comes_as_soon_as_it_is_whole() -> None:
    pieces = Pieces(ByteText())
    assert [pieces.add(byte) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]


@pytest.mark.long
def test_a_card_is_served_with_random_weights_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CARD)
    found = serve.named(str(tmp_path / "tiny.toml"))
    assert (found.name, found.longest, found.version) == ("tiny", 64, "")
    assert "RANDOM weights" in found.warning
    engine = found.engine(serve.Capacity(longest=32, slots=2))
    assert engine.forward.vocab == 256
    (answer,) = engine.generate([[5, 2, 7]], most=4)
    assert len(answer) == 4


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("nothing", ModelError, "not a preset"),
        (
            "no/such/place",
            MissingFileError,
            "there is no model file or folder no/such/place\nTry: a preset",
        ),
        ("switch-base-8", ModelError, "it is not a decoder"),
    ],
)
def test_what_cannot_be_served_is_said(word: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        serve.named(word)
