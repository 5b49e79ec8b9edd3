"""Bodies of requests: read, checked, and turned into requests of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from shardlib.errors import ArgumentError
from shardlib.serve.hosting import OPEN, CallReader, Deployment, forced, plain, tagged
from shardlib.serve.http.settings import Fault, NamedModel
from shardlib.serve.requests import MOST_BIASED, STOP, Form, GenerationRequest, Sampling
from shardlib.untrusted.data import JsonObject, is_integer, shown

# --------------------------------------------------------------------------------------------------
# The base of all bodies.
#
# Values are of the types that they have in JSON; no number is made of a text, and none of a
# boolean. Fields that are not here are ignored, as OpenAI ignores what it does not know.

Token = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """Common base of all bodies, and of their parts."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ModelBody(Body):
    """A body that asks a model for something."""

    model: str | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_characters(cls, given: object) -> object:
        """Refuses halves of surrogate pairs, which JSON can hold and no text has."""
        if (path := half_of_a_pair(given)) is not None:
            raise PydanticCustomError(
                "characters",
                "{field} has half of a surrogate pair, which is not a character",
                {"field": path},
            )
        return given


def half_of_a_pair(body: object) -> str | None:
    """Finds half of a surrogate pair in some JSON, as a dotted path; None where there is none.

    >>> half_of_a_pair({"messages": [{"content": "a\\ud800"}]})
    'messages.0.content'
    """
    waiting: list[tuple[str, object]] = [("", body)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, str) and not item.isascii() and _is_half(item):
            return path or "the body"
        if isinstance(item, dict):
            for name, value in item.items():
                if _is_half(str(name)):
                    return path or "a name"
                waiting.append((f"{path}.{name}" if path else str(name), value))
        elif isinstance(item, list):
            waiting += [(f"{path}.{index}", value) for index, value in enumerate(item)]
    return None


def _is_half(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


#: Texts that end an answer, and characters of each.
STOPS, STOP_LENGTH = 16, 256

StopText = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    """Options of how events are sent."""

    include_usage: bool = False


class Schema(Body):
    """A schema of answers."""

    schema_: JsonObject = Field(alias="schema")


class Format(Body):
    """The form of an answer, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class Structure(Body):
    """The form of an answer, as vLLM has it: one of these."""

    json_schema: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampled(ModelBody):
    """Options of how tokens are chosen."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None


class Choosing(Sampled):
    """Options of how tokens are chosen, when an answer ends, and how it is sent."""

    n: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=STOPS)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    structured_outputs: Structure | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None

    @property
    def prompt_field(self) -> str:
        """The field that prompts are made of."""
        return "prompt"

    @property
    def answers(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def counted(self) -> bool:
        """True if a stream ends with the count of its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that says how many tokens an answer has at most, and what it says."""
        return "max_tokens", self.max_tokens

    @property
    def echoes(self) -> bool:
        """True if prompts stand in front of their answers."""
        return False

    @property
    def scored(self) -> bool:
        """True if tokens of the prompt are listed, too."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def refuse_unserved(body: Answered) -> None:
    """Refuses what is understood and not served, rather than to answer something else."""
    for name in body.unserved:
        raise unserved(name)


def refuse_unusable(body: Answered, deployed: Deployment, *, tokens: int, formed: bool) -> None:
    """Refuses figures that no answer has, and tokens that the model does not have."""
    if body.top and not body.listed:
        raise fault("top_logprobs", "top_logprobs needs logprobs")
    if not tokens and not body.echoes:
        raise fault("max_tokens", "max_tokens is 0, which needs echo: there is nothing to answer")
    if (minimum := body.min_tokens or 0) > tokens:
        limit_name, limit = body.limit
        default = "" if limit else " by default"
        raise fault(
            "min_tokens", f"min_tokens is {minimum}; it is at most {limit_name}, {tokens}{default}"
        )
    if minimum and formed:
        raise fault("min_tokens", "min_tokens is not for answers that have a form")
    biased = body.logit_bias or {}
    if len(biased) > MOST_BIASED:
        raise fault(
            "logit_bias", f"logit_bias has {len(biased)} tokens; {MOST_BIASED} may have one"
        )
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in biased):
        raise fault("logit_bias", "logit_bias is by tokens")
    refuse_unknown("logit_bias", map(int, biased), deployed)
    refuse_unknown("stop_token_ids", body.stop_token_ids or (), deployed)


def refuse_unknown(field: str, tokens: Iterable[int], deployed: Deployment) -> None:
    """Refuses tokens that a model does not have."""
    vocab = deployed.worker.engine.forward.vocab
    if (largest := max(tokens, default=0)) >= vocab:
        raise fault(
            field, f"{field} has the token {largest}; tokens of {deployed.name} are below {vocab}"
        )


def fault(field: str, message: str) -> Fault:
    """Returns the fault of a field."""
    return Fault(400, message, code="invalid_value", param=field)


def unserved(field: str, why: str = "") -> Fault:
    """Returns the fault of a field that is understood and not served."""
    message = f"{field} is not served here" + (f": {why}" if why else "")
    return Fault(400, message, code="unsupported_value", param=field)


async def tokens_of(
    prompts: Sequence[str | Sequence[int]], deployed: Deployment, *, name: str = "prompt"
) -> list[list[int]]:
    """Tokens of the prompts of a body; texts are encoded beside the event loop."""
    tokenized: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens = await encoded(prompt, deployed, name=name)
        else:
            tokens = list(prompt)
        if not tokens:
            raise fault(name, f"{name} is empty")
        refuse_unknown(name, tokens, deployed)
        tokenized.append(tokens)
    return tokenized


async def encoded(text: str, deployed: Deployment, *, name: str, begin: bool = True) -> list[int]:
    """Tokens of a text, beside the event loop."""
    try:
        return await asyncio.to_thread(deployed.served.text.encode, text, begin=begin)
    except ArgumentError as error:
        raise fault(name, str(error)) from error


#: The least probability that OpenAI's `top_p: 0` stands for.
LEAST_TOP_P = 1e-6


def sampling_of(body: Choosing, default: Sampling) -> Sampling:
    """Returns the sampling of a body; where it gives no seed, with one that is drawn."""

    def given(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    seed = secrets.randbits(32) if body.seed is None else body.seed % (1 << 32)
    return Sampling(
        temperature=given(body.temperature, default.temperature),
        top_p=max(given(body.top_p, default.top_p), LEAST_TOP_P),
        top_k=default.top_k if body.top_k is None else max(body.top_k, 0),
        min_p=given(body.min_p, default.min_p),
        seed=seed,
        frequency=given(body.frequency_penalty, default.frequency),
        presence=given(body.presence_penalty, default.presence),
        repetition=given(body.repetition_penalty, default.repetition),
        bias={int(token): float(value) for token, value in (body.logit_bias or {}).items()},
    )


class MessagePart(Body):
    """A part of a message."""

    type: str
    text: str | None = None


class CalledFunction(Body):
    """A function that was called, with its arguments as JSON."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class Call(Body):
    """A call that an assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(min_length=1)] | None = None
    tool_call_id: str | None = None


#: Prompts, or texts to embed, of one request.
MOST_PROMPTS = 256
#: What a prompt may be, in words.
KINDS = "a text, tokens, a list of texts, or a list of lists of tokens"


def read_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Prompts, each a text or its tokens.

    >>> read_prompts([5, 2]), read_prompts(["a", "b"])
    (((5, 2),), ('a', 'b'))

    Raises:
        PydanticCustomError: it is none of `KINDS`, with the item that is wrong.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _wrong(f"it is {_kind(value)}; it is {KINDS}")
    if not value:
        raise _wrong(f"the list is empty; it is {KINDS}")
    if _is_number(value[0]):
        return (_tokens(value, "item {}"),)
    if len(value) > MOST_PROMPTS:
        raise _wrong(f"there are {len(value)} of them; {MOST_PROMPTS} are the most")
    kind = str if isinstance(value[0], str) else list
    for index, item in enumerate(value):
        if not isinstance(item, kind):
            first_item = f", and item 0 {_kind(value[0])}" if index else ""
            raise _wrong(f"item {index} is {_kind(item)}{first_item}; it is {KINDS}")
    if kind is str:
        return tuple(value)
    return tuple(_tokens(item, f"item {index}.{{}}") for index, item in enumerate(value))


def _tokens(items: list[object], place: str) -> tuple[int, ...]:
    if not items:
        raise _wrong(f"{place.removesuffix('.{}')} is empty")
    tokens: list[int] = []
    for index, item in enumerate(items):
        if not is_integer(item) or item < 0:
            what = shown(item) if _is_number(item) else _kind(item)
            raise _wrong(f"{place.format(index)} is {what}; tokens are whole numbers from 0 on")
        tokens.append(item)
    return tuple(tokens)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: object) -> str:
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "a boolean"}
    return kinds.get(type(value), "null" if value is None else "a number")


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("prompt", "{said}", {"said": message})


Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    PlainValidator(read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


#: Tokens of an answer where a body does not say how many.
MOST = 16


class Completion(Choosing):
    """`/v1/completions`."""

    prompt: Prompts
    suffix: str | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def unserved(self) -> list[str]:
        """Fields that are understood and not served."""
        more = self.best_of not in (None, self.answers)
        return ["suffix"] * bool(self.suffix) + ["best_of"] * more

    @property
    def most(self) -> int:
        """Tokens of an answer at most."""
        return MOST if self.max_tokens is None else self.max_tokens

    @property
    def listed(self) -> bool:
        """True if tokens are listed with their logarithms."""
        return self.logprobs is not None

    @property
    def top(self) -> int:
        """Likeliest tokens that are listed beside each."""
        return self.logprobs or 0

    @property
    def echoes(self) -> bool:
        """True if prompts stand in front of their answers."""
        return bool(self.echo)

    @property
    def scored(self) -> bool:
        """True if tokens of the prompt are listed, too."""
        return self.echoes and self.listed


class Embedding(ModelBody):
    """`/v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """A function."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function

    @property
    def json_object(self) -> JsonObject:
        """As a template gets it."""
        return self.model_dump(exclude_none=True)

    @property
    def schema_of_arguments(self) -> JsonObject:
        """Of its arguments; none where nothing is said, as OpenAI has it."""
        none = {"type": "object", "properties": {}, "additionalProperties": False}
        return self.function.parameters or none


class ChosenFunction(Body):
    """A function by its name."""

    name: FunctionName


class NamedTool(Body):
    """The function that is to be called."""

    type: Literal["function"]
    function: ChosenFunction


#: Functions that a body may give.
MOST_TOOLS = 128


class Chat(Choosing):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    modalities: list[str] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[JsonObject] | None = None

    @property
    def prompt_field(self) -> str:
        """The field that prompts are made of."""
        return "messages"

    @property
    def unserved(self) -> list[str]:
        """Fields that are understood and not served."""
        other_modalities = self.modalities not in (None, ["text"])
        return ["functions"] * bool(self.functions) + ["modalities"] * other_modalities

    @property
    def most(self) -> int | None:
        """Tokens of an answer at most; None for as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that says how many tokens an answer has at most, and what it says."""
        if self.max_tokens is not None and self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def listed(self) -> bool:
        """True if tokens are listed with their logarithms."""
        return bool(self.logprobs)

    @property
    def top(self) -> int:
        """Likeliest tokens that are listed beside each."""
        return self.top_logprobs or 0


#: Bodies that are answered with tokens.
Answered: TypeAlias = Chat | Completion


def refuse_tools(body: Chat, deployed: Deployment) -> None:
    """Refuses functions that the model is not told of, and choices among none."""
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise fault("tool_choice", "tool_choice needs tools")
        return
    if body.tool_choice != "none" and not knows_tools(deployed):
        raise unserved(
            "tools", f"{deployed.name} has no template of conversations that writes them"
        )
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise fault("tools", "two functions of tools have one name")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        raise fault(
            "tool_choice",
            f"tool_choice has the function {body.tool_choice.function.name}; tools has"
            f" {', '.join(names)}",
        )


def knows_tools(deployed: Deployment) -> bool:
    """Returns whether the template of a model writes functions."""
    return re.search(r"\btools\b", deployed.served.text.template or "") is not None


def tool_form(body: Chat) -> Form | None:
    """The form of an answer that has to call a function; None for any."""
    if not body.tools or body.tool_choice in (None, "none", "auto"):
        return None
    if isinstance(body.tool_choice, NamedTool):
        function = body.tool_choice.function.name
        tool = next(tool for tool in body.tools if tool.function.name == function)
        return Form.schema(tool.schema_of_arguments)
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": 1 if body.parallel_tool_calls is False else len(body.tools),
        "items": {"anyOf": [_call_schema(tool) for tool in body.tools]},
    }
    return Form.schema(schema)


def reader_of(body: Chat, deployed: Deployment) -> Callable[[], CallReader] | None:
    """Returns the reader of calls in each answer; None where there are none."""
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        return lambda: CallReader(forced(name), ends=STOP)  # the end that OpenAI has for it
    names = frozenset(tool.function.name for tool in body.tools)
    tags = body.tool_choice != "required" and OPEN in (deployed.served.text.template or "")
    return lambda: CallReader(tagged(names) if tags else plain(names))


def _call_schema(tool: Tool) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": tool.schema_of_arguments,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


async def conversation(body: Chat, deployed: Deployment) -> list[int]:
    """Tokens of a conversation, up to where the assistant answers."""
    supports_tools = knows_tools(deployed)
    messages = [
        _written(number, message, supports_tools) for number, message in enumerate(body.messages)
    ]
    tools = [tool.json_object for tool in body.tools or ()] if supports_tools else []
    try:
        text = await asyncio.to_thread(deployed.renderer, messages, tools)
    except ArgumentError as error:
        raise fault("messages", str(error)) from error
    begin = deployed.served.text.template is None
    return await encoded(text, deployed, name="messages", begin=begin)


def _written(number: int, message: Message, supports_tools: bool) -> JsonObject:
    """A message as templates get it."""
    parts = [] if isinstance(message.content, str) else message.content or []
    if any(part.type != "text" or part.text is None for part in parts):
        raise _unwritten(f"messages[{number}] has a part that is not text")
    if message.tool_calls and not supports_tools:
        raise _unwritten(
            f"messages[{number}] has tool_calls, which the template of conversations does not write"
        )
    text = message.content if isinstance(message.content, str) else None
    if text is None:
        text = "".join(part.text or "" for part in parts)
    written: JsonObject = {"role": message.role, "content": text}
    if message.tool_calls:
        written["tool_calls"] = [_call(number, call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    return written


def _call(number: int, call: Call) -> JsonObject:
    """A call; templates get its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise fault(
            "messages",
            f"messages[{number}] has a call of {call.function.name} whose arguments are not a JSON"
            " object",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _unwritten(message: str) -> Fault:
    return Fault(400, message, code="unsupported_value", param="messages")


def response_form(response_format: Format | None) -> Form | None:
    """The form of `response_format`, as OpenAI has it; None for any."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return Form.schema({"type": "object"})
    if response_format.json_schema is None:
        raise ArgumentError("response_format has no json_schema")
    return Form.schema(response_format.json_schema.schema_)


def structured_forms(structure: Structure | None) -> list[Form]:
    """The forms of `structured_outputs`, as vLLM has it."""
    if structure is None:
        return []
    forms: list[Form] = []
    if structure.json_schema is not None:
        schema = structure.json_schema
        text = isinstance(schema, str)
        forms.append(Form(kind="json", text=schema) if text else Form.schema(schema))
    if structure.regex is not None:
        forms.append(Form.regex(structure.regex))
    if structure.choice is not None:
        forms.append(Form.choice(structure.choice))
    if structure.grammar is not None:
        forms.append(Form.grammar(structure.grammar))
    return forms


def form_of(body: Answered, deployed: Deployment) -> Form | None:
    """The form that an answer is to have; None for any."""
    named_forms = [
        ("structured_outputs", form) for form in structured_forms(body.structured_outputs)
    ]
    if (form := response_form(body.response_format)) is not None:
        named_forms.append(("response_format", form))
    if isinstance(body, Chat) and (form := tool_form(body)) is not None:
        named_forms.append(("tool_choice", form))
    if len(named_forms) > 1:
        raise ArgumentError("an answer has one form")
    for name, _ in named_forms:
        if deployed.formless:
            raise unserved(name, deployed.formless)
    return named_forms[0][1] if named_forms else None


def asked_of(
    body: Answered,
    prompts: Sequence[Sequence[int]],
    named: NamedModel,
    *,
    salt: str,
    seconds: float | None = None,
) -> list[GenerationRequest]:
    """Lists the engine's requests: every prompt `n` times, with seeds that follow each other.

    Args:
        seconds: that an answer may take; a body may ask for less. None for any.
    """
    deployed = named.deployed
    engine, text = deployed.worker.engine, deployed.served.text
    requests: list[GenerationRequest] = []
    try:
        form = form_of(body, deployed)
        sizes = [_answer_limit(body, len(prompt), deployed) for prompt in prompts]
        refuse_unusable(body, deployed, tokens=min(sizes), formed=form is not None)
        sampling = sampling_of(body, deployed.served.sampling or Sampling(temperature=1.0))
        for prompt, size in zip(prompts, sizes, strict=True):
            request = GenerationRequest(
                prompt=tuple(prompt),
                most=size,
                sampling=sampling,
                stop=(frozenset() if body.ignore_eos else text.ends)
                | frozenset(body.stop_token_ids or ()),
                salt=salt,
                top=body.top,
                least=body.min_tokens or 0,
                scored=body.scored,
                form=form,
                adapter=named.adapter,
                seconds=min(filter(None, (body.seconds, seconds)), default=None),
            )
            if failures := request.failures(vocab=engine.forward.vocab, room=engine.room):
                raise ArgumentError("; ".join(failures))
            requests += request.answers(body.answers)
    except ArgumentError as error:
        raise Fault(400, str(error), code="invalid_value") from error
    return requests


async def compile_form(
    requests: Sequence[GenerationRequest], deployed: Deployment, stack: contextlib.ExitStack
) -> None:
    """Compiles the form of answers, beside the event loop and the engine."""
    form, guides = requests[0].form, deployed.worker.engine.guides
    if form is None or guides is None:
        return
    future, give_back = guides.compiled(form)
    stack.callback(give_back)
    try:
        await asyncio.wrap_future(future)
    except ArgumentError as error:
        raise Fault(400, str(error), code="invalid_value") from error


def _answer_limit(body: Answered, size: int, deployed: Deployment) -> int:
    """Tokens of an answer to a prompt of so many tokens, at most."""
    longest = deployed.worker.engine.room
    left = longest - size
    limit = max(left, 1) if body.most is None else body.most
    if limit > left:
        raise Fault(
            400,
            f"{deployed.name} looks at {longest} tokens at most; the prompt has {size}, and {limit}"
            " of an answer were asked for",
            code="context_length_exceeded",
            param=body.prompt_field,
        )
    return limit
