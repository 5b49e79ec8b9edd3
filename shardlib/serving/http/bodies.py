"""What is asked, as JSON has it: OpenAI's fields, and some of vLLM's.

Values are of the types that they have there; no number is made of a text, and none of a boolean.
Fields that are not here are ignored, as OpenAI ignores what it does not know.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardlib.untrusted.json_types import JsonObject

#: Texts that end an answer, and characters of each.
STOPS, STOP_LENGTH = 16, 256
#: Prompts, or texts to embed, of one request.
MOST_PROMPTS = 256

StopText = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
ManyTokens = Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
Prompt = str | Tokens | Texts | ManyTokens
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    user: str | None = None


class StreamOptions(Body):
    """How events are sent."""

    include_usage: bool = False


class Structure(Body):
    """The form of an answer, as vLLM has it: one of these."""

    json_schema: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampled(Body):
    """How tokens are chosen."""

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
    """How tokens are chosen, when an answer ends, and how it is sent."""

    n: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=STOPS)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: Structure | None = None

    @property
    def most(self) -> int | None:
        """Tokens of an answer at most, where the body says it."""
        return self.max_tokens

    @property
    def top(self) -> int:
        """Likeliest tokens that are listed beside each."""
        return 0

    @property
    def scored(self) -> bool:
        """Whether tokens of the prompt are listed, too."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(Choosing):
    """`/v1/completions`."""

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def top(self) -> int:
        """Likeliest tokens that are listed beside each."""
        return self.logprobs or 0

    @property
    def scored(self) -> bool:
        """Whether tokens of the prompt are listed, too."""
        return bool(self.echo) and self.logprobs is not None


class Part(Body):
    """A part of a message."""

    type: str
    text: str | None = None


class Message(Body):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[Part] | None = None
    name: str | None = None


class Schema(Body):
    """A schema of answers."""

    schema_: JsonObject = Field(alias="schema")


class Format(Body):
    """The form of an answer, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class Chat(Choosing):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    modalities: list[str] | None = None
    tools: list[JsonObject] | None = None
    functions: list[JsonObject] | None = None

    @property
    def most(self) -> int | None:
        """Tokens of an answer at most, where the body says it."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int:
        """Likeliest tokens that are listed beside each."""
        return self.top_logprobs or 0


class Embedding(Body):
    """`/v1/embeddings`."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
