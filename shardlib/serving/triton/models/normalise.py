"""Vectors to vectors of length 1."""

# pyright: reportMissingImports=false
import json
import sys
from pathlib import Path

SETTINGS = json.loads((Path(__file__).parent / "settings.json").read_text())
sys.path[:0] = SETTINGS["python_path"]

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb  # noqa: E402


class TritonPythonModel:
    """See the module."""

    def execute(self, requests):
        """The vectors of each request."""
        found = []
        for request in requests:
            rows = pb.get_input_tensor_by_name(request, "embedding").as_numpy()
            size = np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
            vectors = tensor("vector", (rows / size).astype(np.float32))
            found.append(pb.InferenceResponse(output_tensors=[vectors]))
        return found


def tensor(name, array):
    """An output. Older backends take arrays of NumPy 2 for something else, and send nothing of
    them; DLPack is read by all.
    """
    if np.__version__.startswith("1."):
        return pb.Tensor(name, np.ascontiguousarray(array))
    return pb.Tensor.from_dlpack(name, np.array(array))
