"""Conversations by templates that nobody trusts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from shardlib.errors import ArgumentError
from shardlib.serving.hosting.templates import Renderer
from shardlib.serving.text import ByteText

MESSAGES = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
#: Of Zephyr, as many templates are: https://huggingface.co/HuggingFaceH4/zephyr-7b-beta
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


@dataclass
class Templated(ByteText):
    """Bytes, with a template."""

    template: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


def test_a_template_is_rendered_as_transformers_does():
    # Without the line after a block and the blanks before it, as `transformers` sets Jinja up.
    right = "<|user|>\nHello.</s>\n<|assistant|>\nYes?</s>\n<|assistant|>\n"
    renderer = Renderer(Templated(template=ZEPHYR, variables={"eos_token": "</s>"}))
    try:
        assert renderer(MESSAGES) == right
        assert renderer(MESSAGES) == right
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected"),
        ("{{ messages.append(1) }}", "is not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ cycler.__init__.__globals__ }}", "__init__"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for a in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "too long",
        ),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError|too much memory"),
        (
            "{% set a = namespace(b='x' * 999) %}{% for c in range(40) %}{% set a.b = a.b ~ a.b %}{% endfor %}",
            "Memory|memory",
        ),
        ("{% for a in range(2000) %}{{ 'x' * 999 }}{% endfor %}", "1998000 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_template_reaches_nothing_and_takes_little(template: str, said: str):
    renderer = Renderer(Templated(template=template))
    begun = time.monotonic()
    try:
        with pytest.raises(ArgumentError, match=f"refuses this: .*({said})"):
            renderer(MESSAGES)
        assert time.monotonic() - begun < 30
        with pytest.raises(ArgumentError):  # by a new process, where the first has ended
            renderer(MESSAGES)
    finally:
        renderer.close()


def test_a_template_that_is_too_long_is_refused():
    with pytest.raises(ArgumentError, match="131072 are the most"):
        Renderer(Templated(template="x" * 200_000))
