"""The body of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardlib.serving.http.bodies.fields import Asking
from shardlib.serving.http.bodies.prompts import Prompts


class Embedding(Asking):
    """`/v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
