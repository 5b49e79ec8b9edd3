"""Runs an artefact of `jax.export`: all requests that Triton has put together are one batch.

A batch is padded to one of a few sizes, so that nothing is compiled after the warm-up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# pyright: reportMissingImports=false

HERE = Path(__file__).parent
SETTINGS = json.loads((HERE / "settings.json").read_text())
sys.path[:0] = [str(HERE), *SETTINGS["python_path"]]

import jax  # noqa: E402
import numpy as np  # noqa: E402
import triton_python_backend_utils as pb  # noqa: E402
from arrays import received, sent  # noqa: E402
from jax import export  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402


class TritonPythonModel:
    """See the module."""

    def initialize(self, args):
        """Loads program and weights."""
        program = export.deserialize(bytearray((HERE / "forward.jax").read_bytes()))
        weights = load_file(HERE / "weights.safetensors")
        self.about = json.loads((HERE / "about.json").read_text())
        self.leaves = [jax.device_put(weights[name]) for name in self.about["weights"]]
        self.program = jax.jit(program.call)

    def execute(self, requests):
        """Computes one batch of all requests."""
        names, rows = list(self.about["inputs"]), [0]
        inputs = {}
        for name in names:
            parts = [received(pb.get_input_tensor_by_name(request, name)) for request in requests]
            rows = [len(part) for part in parts]
            inputs[name] = np.concatenate(parts)
        total = sum(rows)
        size = next(size for size in SETTINGS["sizes"] if size >= total)
        padded = {
            name: np.concatenate([array, np.zeros((size - total, *array.shape[1:]), array.dtype)])
            for name, array in inputs.items()
        }
        computed = self.program(self.leaves, padded)
        outputs = {name: np.asarray(array) for name, array in computed.items()}
        answers, first = [], 0
        for count in rows:
            here = slice(first, first + count)
            tensors = [sent(name, array[here]) for name, array in outputs.items()]
            answers.append(pb.InferenceResponse(output_tensors=tensors))
            first += count
        return answers
