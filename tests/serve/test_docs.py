"""The program that docs/serving.md shows runs, and gives what the forward pass gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardlib.serve.cache import all_plain

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.mark.long
def test_the_program_of_the_page_answers_as_its_forward_pass(capsys: pytest.CaptureFixture[str]):
    program, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    found = eval(capsys.readouterr().out)
    params = all_plain(names["engine"].compute.weights[0])
    for prompt, answer in zip(([5, 2, 7], [11]), found, strict=True):
        tokens = [*prompt, *answer]
        logits = names["forward"](params, np.asarray([tokens]))[0]
        picked = np.argmax(logits, axis=-1)[len(prompt) - 1 : -1]
        assert picked.tolist() == answer
