"""Functions: given to templates, called in answers, forced by forms; by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from shardlib.serve.hosting import (
    AnswerPart,
    CallReader,
    Deployment,
    TextParser,
    forced,
    plain,
    tagged,
)
from shardlib.serve.http.app import joined

PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["a", "b"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "stop", "parameters": {"enum": [{}]}}},
]
ASK: Any = [{"role": "user", "content": "How is it?"}]
CALL = {"name": "weather", "arguments": {"place": "a", "days": 2}}


def said(text: str) -> dict[str, Any]:
    """What has a model without training say a text."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, "max_tokens": 200}


def test_an_answer_calls_functions(folder_client: openai.OpenAI):
    tag = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    other = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    asked: dict[str, Any] = {"model": "tiny-llama", "messages": ASK, "tools": TOOLS}
    whole = folder_client.chat.completions.create(**asked, **said(f"Well. {tag}\n{other}")).choices[
        0
    ]
    calls: Any = whole.message.tool_calls
    assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == [
        ("weather", CALL["arguments"]),
        ("stop", {}),
    ]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Well. ")
    assert len({one.id for one in calls}) == 2
    with folder_client.chat.completions.stream(**asked, **said(f"Well. {tag}\n{other}")) as stream:
        pieces = [one.delta for one in stream if one.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(pieces) > 3 and "".join(pieces) == final.message.content == "Well. "
    streamed: Any = final.message.tool_calls
    assert [(one.function.name, one.function.arguments) for one in streamed] == [
        (one.function.name, one.function.arguments) for one in calls
    ]
    assert final.finish_reason == "tool_calls"
    events: Any = folder_client.chat.completions.create(
        **asked, **said(f"Well. {tag}"), stream=True
    )
    heard = [one.choices[0].delta for one in events if one.choices]
    assert all(one.content or one.tool_calls for one in heard[1:-1])  # nothing of held back tokens
    deltas = [one.tool_calls for one in heard]
    told = [delta[0] for delta in deltas if delta]
    assert told[0].function.name == "weather" and told[0].id and told[0].type == "function"
    assert len(told) > 5 and not any(one.id or one.function.name for one in told[1:])
    assert "".join(one.function.arguments for one in told) == json.dumps(CALL["arguments"])
    cut = folder_client.chat.completions.create(**asked, **said(tag[:-3])).choices[0]
    (call,) = cut.message.tool_calls or []
    assert call.type == "function" and json.loads(call.function.arguments) == CALL["arguments"]
    unknown = tag.replace("weather", "wether")
    for text in ("No <tool.", unknown, "<tool_call>{</tool_call>"):
        plain_text = folder_client.chat.completions.create(**asked, **said(text)).choices[0]
        assert (plain_text.message.content, plain_text.message.tool_calls) == (text, None)
        assert plain_text.finish_reason == "stop"
    none = folder_client.chat.completions.create(**asked, tool_choice="none", **said(tag)).choices[
        0
    ]
    assert (none.message.content, none.message.tool_calls) == (tag, None)


def test_a_forced_call_has_arguments_of_its_schema(folder_client: openai.OpenAI):
    asked: dict[str, Any] = {
        "model": "tiny-llama",
        "messages": ASK,
        "tools": TOOLS,
        "max_tokens": 200,
    }
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for seed in range(2):
        found = folder_client.chat.completions.create(
            tool_choice=named, seed=seed, **asked
        ).choices[0]
        (call,) = found.message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), PLACE)
        assert (found.finish_reason, found.message.content) == ("stop", None)
        one = folder_client.chat.completions.create(
            tool_choice="required", seed=seed, parallel_tool_calls=False, **asked
        ).choices[0]
        (call,) = one.message.tool_calls or []
        assert call.type == "function" and call.function.name in ("weather", "stop")
        schema = PLACE if call.function.name == "weather" else {"enum": [{}]}
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert one.finish_reason == "tool_calls"
    with folder_client.chat.completions.stream(tool_choice=named, seed=0, **asked) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), PLACE)


def test_results_of_calls_are_written_for_the_model(
    folder_client: openai.OpenAI, folder: Deployment
):
    function = {"name": "weather", "arguments": '{"place": "a"}'}
    messages: Any = [
        *ASK,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "7 C"},
    ]
    usage = folder_client.chat.completions.create(
        model="tiny-llama", messages=messages, tools=TOOLS[1:], max_tokens=1
    ).usage
    told = f"<tool_call>{json.dumps(TOOLS[1])}[user]How is it?</s>"
    told += '[assistant]weather{"place": "a"}</s>[tool]7 C</s>[assistant]'
    assert usage is not None
    assert usage.prompt_tokens == len(folder.served.text.encode(f"<s>{told}", begin=False))


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_choice has the function x; tools has weather, stop",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two functions of tools have one name"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"functions": [{"name": "a"}]}, "functions", "functions is not served here"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            None,
            "an answer has one form",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "1", "function": {"name": "weather", "arguments": "[1]"}}
                        ],
                    }
                ]
            },
            "messages",
            "messages[0] has a call of weather whose arguments are not a JSON object",
        ),
    ],
)
def test_what_cannot_be_called_is_said(
    folder_client: openai.OpenAI, body: dict[str, Any], field: str | None, message: str
):
    with pytest.raises(openai.BadRequestError) as found:
        folder_client.chat.completions.create(model="tiny-llama", messages=ASK, extra_body=body)
    assert message in found.value.message and found.value.param == field


def read(split: TextParser, text: str, size: int) -> tuple[str, list[tuple[str, Any]], str | None]:
    """Text, calls and end, of an answer that comes in pieces of so many characters."""
    reader = CallReader(split)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [reader.add(AnswerPart(one, (), None)) for one in pieces]
    parts.append(reader.add(AnswerPart("", (), "stop")))
    pieces = [one for part in parts for one in part.calls]
    found = joined(pieces)
    assert [one.index for one in found] == list(range(len(found)))
    assert len({(one.index, one.id) for one in pieces}) == len(found)
    calls = [(one.name, json.loads(one.arguments)) for one in found]
    return "".join(one.text for one in parts), calls, parts[-1].ended


A, B = {"place": "a", "days": 2}, {"place": "<b>", "days": 3}


@pytest.mark.unit
@pytest.mark.parametrize("size", [1, 2, 7, 500])
@pytest.mark.parametrize(
    ("split", "text", "rest", "calls"),
    [
        (tagged, f'<tool_call>{{"name": "f", "arguments": {json.dumps(A)}}}</tool_call>', "", [A]),
        (
            tagged,
            f'So\n<tool_call>\n{{"arguments": {json.dumps(B)}, "name": "f"}}\n</tool_call>\n'
            f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(A)}}}\n</tool_call>\n',
            "So\n",
            [B, A],
        ),
        (tagged, "a <tool_call> b", "a <tool_call> b", []),
        (tagged, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        (plain, f'{{"name": "f", "parameters": {json.dumps(A)}}}', "", [A]),
        (plain, f' [{{"name": "f", "arguments": {json.dumps(B)}}}]', "", [B]),
        (
            plain,
            f'{{"name": "f", "parameters": {json.dumps(A)}}}; {{"name": "f", "parameters": {{}}}}',
            "",
            [A, {}],
        ),
        (plain, '{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}', []),
        (plain, '{"name": "f", "parameters": NaN}', '{"name": "f", "parameters": NaN}', []),
        (plain, 'It is {"name": "f"}', 'It is {"name": "f"}', []),
        (plain, "[" * 3000, "[" * 3000, []),
        (plain, "{}", "{}", []),
    ],
)
def test_calls_are_read_however_they_come(
    split: Any, text: str, rest: str, calls: list[Any], size: int
):
    ended = "tool_calls" if calls else "stop"
    assert read(split({"f"}), text, size) == (rest, [("f", one) for one in calls], ended)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("split", "text", "rest", "arguments"),
    [
        (tagged, '<tool_call>{"name": "f", "arguments": {"a": [1, ', "", ['{"a": [1, ']),
        (tagged, '<tool_call>{"name": "f", "arguments": {a}</tool_call>b', "b", ["{a}"]),
        (plain, '{"name": "f", "parameters": {"a": "\\"', "", ['{"a": "\\"']),
        (plain, '{"name": "f", "parameters": {}} and more', "and more", ["{}"]),
        (forced, '{"a', "", ['{"a']),
    ],
)
def test_what_a_call_has_is_given_as_it_comes(
    split: Any, text: str, rest: str, arguments: list[str]
):
    for size in (1, 3, 500):
        reader = CallReader(split("f" if split is forced else {"f"}))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        parts = [reader.add(AnswerPart(one, (), None)) for one in pieces]
        given = len(joined(one for part in parts for one in part.calls))
        parts.append(reader.add(AnswerPart("", (), "length")))
        found = joined(one for part in parts for one in part.calls)
        assert ["f"] * given == [one.name for one in found], "before the end"
        assert [one.arguments for one in found] == arguments
        assert ("".join(one.text for one in parts), parts[-1].ended) == (rest, "length")
