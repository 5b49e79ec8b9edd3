"""The program that docs/steps.md shows runs, and gives what plain JAX gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "steps.md"


def test_the_program_of_the_page_gives_what_plain_jax_gives():
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(program, names)
    wanted, metrics = jax.jit(names["step"])(names["init"](jax.random.key(0)), names["batch"])
    for mine, theirs in zip(
        jax.tree.leaves((names["state"], names["metrics"])),
        jax.tree.leaves((wanted, metrics)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
