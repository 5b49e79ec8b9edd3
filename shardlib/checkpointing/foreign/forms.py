"""How an array of a Flax model lies in a tensor of PyTorch.

>>> forms_of((6, 2, 4), (8, 6)), forms_of((8, 2, 4), (8, 8))
(('transposed',), ('same', 'transposed'))
>>> forms_of((3, 3, 8, 16), (16, 8, 3, 3))
('convolution',)
>>> import numpy as np
>>> in_form(np.ones((6, 4)), "transposed", (4, 2, 3)).shape
(4, 2, 3)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Shape = tuple[int, ...]


def forms_of(param: Shape, tensor: Shape) -> tuple[str, ...]:
    """The forms in which a tensor may hold an array; none where it cannot, and two where shapes do
    not say which, as those of square matrices do not.
    """
    if len(tensor) >= 3 and len(param) == len(tensor):
        order = (len(param) - 1, len(param) - 2, *range(len(param) - 2))
        if tuple(param[at] for at in order) == tensor:
            return ("convolution",)
    found = ["same"] if param == tensor or _joins(param, tensor) else []
    if len(tensor) == 2 and len(param) >= 2 and _joins(param, tensor[::-1]):
        found.append("transposed")
    return tuple(found)


def in_form(tensor: np.ndarray, form: str, shape: Shape) -> np.ndarray:
    """A tensor as the array that it holds."""
    if form == "convolution":
        return tensor.transpose(*range(2, tensor.ndim), 1, 0)
    return (tensor.T if form == "transposed" else tensor).reshape(shape)


def _joins(param: Shape, tensor: Sequence[int]) -> bool:
    """Whether neighbouring dims joined give the dims of a tensor."""
    at = 0
    for size in tensor:
        joined = 1
        while at < len(param) and joined < size:
            joined *= param[at]
            at += 1
        if joined != size:
            return False
    return all(size == 1 for size in param[at:])
