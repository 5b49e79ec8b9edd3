"""Answers have the form that is asked for: what another library validates, whatever the model says.

The model is not trained, and answers with a temperature: it has no inclination of its own to write
JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlib import models
from shardlib.errors import ArgumentError, ModelError
from shardlib.serve.engine import Engine
from shardlib.serve.folders import read_text, spelt
from shardlib.serve.requests import Capacity, Form, GenerationRequest, Request, Sampling
from tests.serve.test_meshes import DENSE, forward

pytest.importorskip("llguidance", reason="needs the extra `structured`")

#: Bytes, some longer tokens, one that spells nothing, and the end; the model has a few more.
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(b'{"', b'":', b'",', b"true", b"null", b"12", b"]}", "é".encode(), b"ab", b""),
    b"<end>",
]
END, VOCAB = len(TOKENS) - 1, 272
INIT = models.build(replace(DENSE, vocab_size=VOCAB))[0]
SIZES = Capacity(longest=320, slots=6, page=16, pages=80, budget=24)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """That guesses ahead, too."""
    made = Engine(INIT, forward, weights=3, capacity=replace(SIZES, drafts=2), check=False)
    made.spell(TOKENS, {END})
    return made


def answered(engine: Engine, forms: list[Form], seed: int = 0, **more: Any) -> list[Request]:
    requests = [
        engine.add(
            GenerationRequest(
                prompt=(65, 66, 65, 66),
                most=300,
                form=form,
                sampling=Sampling(temperature=1.0, seed=seed + number),
                **more,
            )
        )
        for number, form in enumerate(forms)
    ]
    engine.run()
    return requests


def text(request: Request) -> str:
    assert END not in request.answer and max(request.answer, default=0) < len(TOKENS)
    return b"".join(TOKENS[token] for token in request.answer).decode()


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-99, 99), st.integers(0, 999)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]}
    ),
    st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(st.sampled_from(["a", "é", 'q"', 3, None, True]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], needed: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": [name for at, name in enumerate(properties) if needed >> at & 1],
            "additionalProperties": False,
        }

    names = st.sampled_from(["id", "name", "größe", "x y"])
    return st.one_of(
        st.builds(made, st.dictionaries(names, inner, max_size=3), st.integers(0, 7)),
        st.builds(
            lambda items, least: {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": 2,
            },
            inner,
            st.integers(0, 2),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
    )


@pytest.mark.long
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(objects(objects(LEAVES) | LEAVES), min_size=4, max_size=4), st.integers(0, 999))
def test_every_answer_is_what_its_schema_describes(
    engine: Engine, schemas: list[dict[str, Any]], seed: int
):
    for request, schema in zip(
        answered(engine, [Form.schema(one) for one in schemas], seed), schemas, strict=True
    ):
        assert request.ended == "stop", text(request)
        jsonschema.validate(json.loads(text(request)), schema)
    assert engine.schedule.pool.available == engine.schedule.pool.pages


@pytest.mark.long
def test_expressions_and_choices_are_matched(engine: Engine):
    patterns = [r"[a-c]{3}-\d{2,4}", r"(yes|no)( sir)?", r"é+x"]
    found = answered(engine, [Form.regex(one) for one in patterns])
    for request, pattern in zip(found, patterns, strict=True):
        assert request.ended == "length" or re.fullmatch(pattern, text(request))
    words = ["red", "green", "blue (light)", "a|b"]
    said = {text(one) for one in answered(engine, [Form.choice(words)] * 24)}
    assert said <= set(words) and len(said) > 2
    (summed,) = answered(engine, [Form.grammar('start: NUMBER "+" NUMBER\nNUMBER: /[1-9]{2}/')])
    assert re.fullmatch(r"[1-9]{2}\+[1-9]{2}", text(summed))


@pytest.mark.long
def test_others_are_not_bound_and_guesses_change_nothing(engine: Engine):
    form = Form.schema({"type": "array", "items": {"enum": ["ab", "abab"]}, "maxItems": 6})
    plain = Engine(INIT, forward, weights=3, capacity=replace(SIZES, pages=24), check=False)
    plain.spell(TOKENS, {END})
    free = engine.add(GenerationRequest(prompt=(1, 2), most=20))
    told = [
        [(one.answer, one.ended) for one in answered(served, [form] * 6, top=2, scored=True)]
        for served in (engine, plain)
    ]
    assert told[0] == told[1]
    assert free.answer == plain.generate([[1, 2]], 20)[0]


def test_a_form_that_is_whole_ends_an_answer_at_its_last_token(engine: Engine):
    request = engine.add(GenerationRequest(prompt=(65,), most=3, form=Form.regex("xyz")))
    engine.run()
    assert (text(request), request.ended) == ("xyz", "stop")
    request = engine.add(GenerationRequest(prompt=(65,), most=2, form=Form.regex("xyz")))
    engine.run()
    assert (text(request), request.ended) == ("xy", "length")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda: Form.regex("(a"), "unclosed group"),
        (lambda: Form.schema({"type": "nonsense"}), "Invalid type: nonsense"),
        (lambda: Form.schema({"not": {"type": "null"}, "unevaluatedItems": 3}), "not usable"),
        (lambda: Form(kind="json", text="{"), "not usable"),
        (lambda: Form.grammar("start: nothing"), "not usable"),
        (lambda: Form.choice([]), "a choice is a list of texts, as JSON, of at least one"),
        (lambda: Form.choice(["a", ""]), "a choice is a list of texts"),
        (lambda: Form(kind="xml", text="a"), "the form is 'xml'; it is one of json, regex"),
        (lambda: Form.schema({"enum": [float("nan")]}), "the schema is not valid JSON"),
        (
            lambda: Form.schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "no answer has it",
        ),
    ],
    ids=[
        "regex",
        "type",
        "keywords",
        "no json",
        "grammar",
        "empty",
        "blank",
        "kind",
        "nan",
        "loop",
    ],
)
def test_forms_that_are_not_usable_are_refused(engine: Engine, form: Any, said: str):
    with pytest.raises(ArgumentError, match=said):
        engine.add(GenerationRequest(prompt=(1,), form=form()))


def test_what_a_form_needs_is_said(engine: Engine):
    form = Form.regex("a")
    bare = Engine(INIT, forward, capacity=SIZES, check=False)
    with pytest.raises(ArgumentError, match="nothing is known of what tokens spell"):
        bare.add(GenerationRequest(prompt=(1,), form=form))
    with pytest.raises(ArgumentError, match="has a form bars no tokens"):
        engine.add(GenerationRequest(prompt=(1,), form=form, least=2))
    with pytest.raises(ArgumentError, match="at least one of those that are spelt ends an answer"):
        bare.spell(TOKENS, {})
    with pytest.raises(ArgumentError, match="300 tokens are spelt"):
        bare.spell([b"a"] * 300, {1})


def test_tokens_of_a_file_of_hugging_face_spell_what_it_decodes(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ['hello world "id": 12 é'] * 20,
        tokenizers.trainers.BpeTrainer(
            vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
        ),
    )
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    tokens, said = spelt(path), ' "id": 12 hello é'
    assert len(tokens) == made.get_vocab_size() and tokens[:2] == [b"", b""]
    assert b"".join(tokens[token] for token in made.encode(said).ids) == said.encode()
    text = read_text(tmp_path)
    alone = [token for token in range(len(tokens)) if "\ufffd" in text.decode([token])]
    told = [tokens[one] or b"\xff" for one in alone]  # llguidance says nothing of this byte
    assert len(alone) > 100 and [text.raw(one) for one in alone] == told
    path.write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        spelt(path)
