"""The form that an answer is to have."""

from __future__ import annotations

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.deployment import Deployment
from shardlib.serving.http.asking.tools import tool_form
from shardlib.serving.http.bodies.chat import Chat
from shardlib.serving.http.bodies.choosing import Choosing, Format, Structure
from shardlib.serving.http.faults import Fault
from shardlib.serving.scheduling.forms import Form


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


def form_of(body: Choosing, deployed: Deployment) -> Form | None:
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
            raise Fault(
                400,
                f"{name} is not served here: {deployed.formless}",
                code="unsupported_value",
                param=name,
            )
    return named_forms[0][1] if named_forms else None
