"""Vectors to vectors of length 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path

# pyright: reportMissingImports=false

HERE = Path(__file__).parent
SETTINGS = json.loads((HERE / "settings.json").read_text())
sys.path[:0] = [str(HERE), *SETTINGS["python_path"]]

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb  # noqa: E402
from arrays import received, sent  # noqa: E402


class TritonPythonModel:
    """See the module."""

    def execute(self, requests):
        """The vectors of each request."""
        responses = []
        for request in requests:
            rows = received(pb.get_input_tensor_by_name(request, "embedding"))
            size = np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
            vectors = sent("vector", (rows / size).astype(np.float32))
            responses.append(pb.InferenceResponse(output_tensors=[vectors]))
        return responses
