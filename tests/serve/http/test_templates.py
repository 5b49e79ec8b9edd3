"""Conversations by templates that nobody trusts."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardlib.errors import ArgumentError
from shardlib.serve.hosting import Renderer
from shardlib.serve.served import ByteText

MESSAGES = [{"role": "user", "content": "Hello."}]


@dataclass
class Templated(ByteText):
    """Bytes, with a template."""

    template: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


STORED = json.loads(Path(__file__).with_name("conversations.json").read_text("utf-8"))


def test_templates_are_rendered_as_transformers_does():
    """`conversations.json` has texts that `transformers` itself made."""
    assert STORED["made_by"].startswith("transformers 5.")
    for one in STORED["conversations"]:
        renderer = Renderer(Templated(template=one["template"], variables=STORED["variables"]))
        try:
            assert renderer(one["messages"], one.get("tools", ())) == one["text"], one["name"]
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
