"""What the page on partial training shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

PAGE = (Path(__file__).parents[2] / "docs/partial_training.md").read_text()


def test_the_recipe_runs():
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    scope: dict[str, object] = {"__name__": "page"}
    exec(compile(code, "partial_training.md", "exec"), scope)
    program, state, model = scope["program"], scope["state"], scope["model"]
    first = program.module(program.init(seed=0))
    assert np.array_equal(first.up.kernel[...], model.up.kernel[...])
    assert (
        not np.asarray(first.up.lora.lora_b[...]).any()
        and np.asarray(model.up.lora.lora_b[...]).any()
    )
    assert state.params["up"]["kernel"].addressable_shards[0].data.size == 64 * 256 // 8
