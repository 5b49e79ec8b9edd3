"""Every example runs on eight simulated devices, and learns."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
#: Steps, and the share of the first figure that is left after them at most.
LEARNS = {
    "diffusion": (200, 0.6),
    "dpo": (40, 0.1),
    "gan": (400, 0.5),
    "graph_network": (30, 0.5),
    "language_model": (20, 0.9),
    "lora_of_hugging_face": (60, 0.3),
    "recommender": (60, 0.2),
    "vision_transformer": (25, 0.1),
}


def main_of(name: str) -> Callable[[list[str]], list[float]]:
    described = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module.main


def test_every_example_is_run() -> None:  # that of federated learning needs Flower
    assert {path.stem for path in FOLDER.glob("*.py")} == {*LEARNS, "federated_text"}


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("name", LEARNS)
def test_the_example_learns(name: str) -> None:
    steps, share = LEARNS[name]
    first, last = main_of(name)(["--steps", str(steps)])
    assert last < share * first
