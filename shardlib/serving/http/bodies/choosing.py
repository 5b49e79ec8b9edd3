"""How an answer is chosen, when it ends, and how it is sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardlib.serving.http.bodies.fields import Asking, Body, Token
from shardlib.untrusted.json_types import JsonObject

#: Texts that end an answer, and characters of each.
STOPS, STOP_LENGTH = 16, 256

StopText = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    """How events are sent."""

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


class Sampled(Asking):
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
    response_format: Format | None = None
    structured_outputs: Structure | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None

    @property
    def prompt_field(self) -> str:
        """The field that prompts are made of."""
        return "prompt"

    @property
    def unserved(self) -> list[str]:
        """Fields that are understood and not served."""
        return []

    @property
    def answers(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def counted(self) -> bool:
        """Whether a stream ends with the count of its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def most(self) -> int | None:
        """Tokens of an answer at most; None for as many as fit."""
        return self.max_tokens

    @property
    def listed(self) -> bool:
        """Whether tokens are listed with their logarithms."""
        return False

    @property
    def top(self) -> int:
        """Likeliest tokens that are listed beside each."""
        return 0

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that says how many tokens an answer has at most, and what it says."""
        return "max_tokens", self.max_tokens

    @property
    def echoes(self) -> bool:
        """Whether prompts stand in front of their answers."""
        return False

    @property
    def scored(self) -> bool:
        """Whether tokens of the prompt are listed, too."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
