"""Arrays and texts between requests and programs; it stands beside each `model.py`.

The Python backend of Triton 2.51 and 2.52 is built with a pybind11 from before NumPy 2; later ones
have 2.12 (https://github.com/triton-inference-server/python_backend/pull/384). The old one reads 0
as the size of an element of NumPy 2's arrays: what `as_numpy` gives is the first element over and
over, outputs made of arrays are empty, and a text ends the process. DLPack does not ask NumPy, so
numbers go that way; for texts there is no other way.
"""

from __future__ import annotations

import numpy as np
import triton_python_backend_utils as pb

# pyright: reportMissingImports=false

NUMPY_2 = not np.__version__.startswith("1.")
NO_TEXTS = (
    f"this Triton's Python backend is older than NumPy 2 and cannot exchange texts with NumPy"
    f" {np.__version__}"
)


def received(tensor):
    """The array of an input of numbers, read-only."""
    return np.from_dlpack(tensor) if NUMPY_2 else tensor.as_numpy()


def sent(name, array):
    """An output of numbers."""
    if NUMPY_2:
        return pb.Tensor.from_dlpack(name, np.array(array))
    return pb.Tensor(name, np.ascontiguousarray(array))


def has_texts():
    """Returns whether the backend reads and sends texts with this NumPy."""
    if not NUMPY_2:
        return True
    sample = np.asarray([1, 2, 3], np.int32)
    return pb.Tensor.from_dlpack("known", sample).as_numpy().tolist() == sample.tolist()
