"""What a choice shards, dim by dim."""

from __future__ import annotations

import itertools

import pytest

from shardlib.propagation.colours import Choice


@pytest.mark.parametrize("at", [None, 1, 2])
@pytest.mark.parametrize("tensor", [(), ("heads",), ("mlp",)])
def test_a_context_axis_of_one_device_changes_nothing(
    at: int | None, tensor: tuple[str, ...]
) -> None:
    """Attention has the sequence twice, for queries and for keys: what tensor shards must not
    depend on an axis that is not there, since plans are priced with it and made without.
    """
    for colours in itertools.permutations(("batch", "seq", "seq", "heads")):
        if at is not None and colours[at] != "seq":
            continue
        alone, beside = (
            Choice(tensor=tensor, batch="batch", sequence="seq", context=context).spec(
                colours, sequence_dim=at
            )
            for context in (None, "seq")
        )
        without = tuple(
            {"context": None, "context+tensor": "tensor"}.get(part or "", part) for part in beside
        )
        assert without == alone, (colours, at, beside)
