"""The programs that docs/server.md shows run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openai
import pytest

PAGE = Path(__file__).parents[3] / "docs" / "server.md"


@pytest.mark.long
def test_the_programs_of_the_page_run(
    client: openai.OpenAI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asking, embedded = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.setattr(openai, "OpenAI", lambda **_: client)
    names: dict[str, Any] = {}
    exec(asking.replace('model="a"', 'model="tiny"'), names)
    assert len(capsys.readouterr().out) > 60
    exec(embedded, {})
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")
