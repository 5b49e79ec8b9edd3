"""The safetensors files of a folder: which tensors there are, and slices of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from shardlib.errors import CheckpointError, MissingFileError, raise_all
from shardlib.untrusted import Limits, construct, fit, printable, read_json, shown
from shardlib.untrusted.shown import bounded

INDEX = "model.safetensors.index.json"
#: dtypes of files that NumPy can hold.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


#: An index names every tensor of a model.
INDEX_LIMITS = Limits(bytes=1 << 27)


@dataclass(frozen=True, kw_only=True)
class _Index:
    """What an index has: tensor -> file."""

    weight_map: Mapping[str, str]


@dataclass(kw_only=True)
class Files:
    """Open files of a folder; to be used in a `with` statement.

    Attributes:
        folder: where they are.
        tensors: name -> (shape, dtype in the files' words).
    """

    folder: Path
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    _slices: dict[str, Any] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Files:
        for path in _paths(self.folder):
            if not path.is_file():
                self._open.close()
                raise CheckpointError(
                    f"{path} is no file that can be read\nTry: fetch the file again"
                )
            try:
                file = self._open.enter_context(safe_open(path, "np"))
                found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, ValueError, TypeError) as error:
                self._open.close()
                raise CheckpointError(
                    f"{path} cannot be read ({fit(printable(str(error)), 300)})\nTry: fetch the"
                    " file again"
                ) from error
            if twice := sorted(set(found) & set(self._slices)):
                self._open.close()
                raise CheckpointError(
                    f"{path} has tensors that another file has, too:"
                    f" {', '.join(map(shown, twice[:10]))}\nTry: the files of one model in the"
                    f" folder, or its {INDEX}"
                )
            self._slices |= found
            self.tensors |= {
                name: (tuple(one.get_shape()), one.get_dtype()) for name, one in found.items()
            }
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._open.close()

    def read(self, name: str, places: Sequence[np.ndarray]) -> np.ndarray:
        """The places of a tensor, a list of them for each dim; no more is read than what lies
        between the first and the last place.
        """
        region = tuple(slice(int(dim.min()), int(dim.max()) + 1) for dim in places)
        values: np.ndarray = self._slices[name][region]
        for axis, (dim, span) in enumerate(zip(places, region, strict=True)):
            if len(dim) != values.shape[axis] or (np.diff(dim) != 1).any():
                values = np.take(values, dim - span.start, axis)
        return values


def _paths(folder: Path) -> list[Path]:
    """The files that the index names, or those that there are."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(
            set(
                construct(
                    _Index,
                    read_json(
                        index, "index of safetensors files", CheckpointError, limits=INDEX_LIMITS
                    ),
                    f"the index {index} of safetensors files",
                    CheckpointError,
                    hint="fetch it again",
                ).weight_map.values()
            )
        )
        outside = [
            f"{shown(name)} is no name of a file of its folder"
            for name in names
            if Path(name).name != name or name in ("", ".", "..") or "\0" in name or len(name) > 255
        ]
        if outside:
            raise_all(
                CheckpointError,
                f"{index} names files that it may not name",
                bounded(outside),
                hint="fetch it again, from whom you trust",
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise MissingFileError(
                f"{index} names files that are not in the folder:"
                f" {', '.join(map(shown, missing[:20]))}\nTry: fetch them too"
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise MissingFileError(
            f"there is no .safetensors file in {folder}\nTry: the folder of a model as Hugging Face"
            " has it, not in the older .bin form"
        )
    return found
