"""What the README shows works as shown."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_prints_what_follows_it():
    code, shown = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", README, re.DOTALL).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    text = printed.getvalue()
    labels = [line for line in shown.splitlines() if re.match(r"\w+$", line)]
    assert labels == ["Decisions", "Why"] and all(f"\n{label}\n" in text for label in labels)
    assert shown.splitlines()[0] == text.splitlines()[0]


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[1] / link).exists(), link
