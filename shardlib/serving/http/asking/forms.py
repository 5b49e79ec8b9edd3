"""The form that an answer is to have."""

from __future__ import annotations

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.asking.tools import tool_form
from shardlib.serving.http.bodies.chat import Chat
from shardlib.serving.http.bodies.choosing import Choosing, Format, Structure
from shardlib.serving.http.faults import Fault
from shardlib.serving.scheduling.forms import Form


def response_form(said: Format | None) -> Form | None:
    """The form of `response_format`, as OpenAI has it; None for any.

    Args:
        said: of a body.

    Raises:
        ArgumentError: it is none.
    """
    if said is None or said.type == "text":
        return None
    if said.type == "json_object":
        return Form.schema({"type": "object"})
    if said.json_schema is None:
        raise ArgumentError("response_format has no json_schema")
    return Form.schema(said.json_schema.schema_)


def structured_forms(said: Structure | None) -> list[Form]:
    """The forms of `structured_outputs`, as vLLM has it.

    Args:
        said: of a body.

    Raises:
        ArgumentError: one is none.
    """
    if said is None:
        return []
    found: list[Form] = []
    if said.json_schema is not None:
        schema = said.json_schema
        text = isinstance(schema, str)
        found.append(Form(kind="json", text=schema) if text else Form.schema(schema))
    if said.regex is not None:
        found.append(Form.regex(said.regex))
    if said.choice is not None:
        found.append(Form.choice(said.choice))
    if said.grammar is not None:
        found.append(Form.grammar(said.grammar))
    return found


def form_of(body: Choosing, deployed: Deployment) -> Form | None:
    """The form that an answer is to have; None for any.

    Args:
        body: of the request.
        deployed: the model that answers.

    Raises:
        ArgumentError: it is none, or there are several.
        Fault: 400; answers of the model can have no form.
    """
    found = [("structured_outputs", form) for form in structured_forms(body.structured_outputs)]
    if (form := response_form(body.response_format)) is not None:
        found.append(("response_format", form))
    if isinstance(body, Chat) and (form := tool_form(body)) is not None:
        found.append(("tool_choice", form))
    if len(found) > 1:
        raise ArgumentError("an answer has one form")
    for name, _ in found:
        if deployed.formless:
            raise Fault(
                400,
                f"{name} is not served here: {deployed.formless}",
                code="unsupported_value",
                param=name,
            )
    return found[0][1] if found else None
