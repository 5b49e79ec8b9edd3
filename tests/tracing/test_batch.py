"""Batches of types of one's own are told about by their own fields."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from shardlib.errors import BatchError
from shardlib.tracing.trace import describe_batch


class Graphs(NamedTuple):
    nodes: Any
    edges: Any
    weights: Any
    n_node: Any


GRAPHS = Graphs(
    nodes=np.ones((40, 3)), edges={"from": np.ones(90), "to": np.ones(90)}, weights=None,
    n_node=np.ones(8),
)  # fmt: skip


def test_an_error_names_the_fields_of_the_batch():
    with pytest.raises(BatchError) as error:
        describe_batch(GRAPHS)
    assert "batch.edges.from: shape (90,)" in str(error.value)
    assert (
        "Try: name the dims, for example batch_axes=Graphs(nodes=(None, None), edges={'from':"
        " ('batch',), 'to': ('batch',)}, weights=None, n_node=(None,)), where the 90 are the rows"
    ) in str(error.value)
    assert "PRNGKey" not in str(error.value)


def test_the_example_of_the_error_is_taken():
    axes = Graphs(
        nodes=(None, None), edges={"from": ("batch",), "to": ("batch",)}, weights=None,
        n_node=(None,),
    )  # fmt: skip
    assert [names for *_, names in describe_batch(GRAPHS, axes)] == [
        (None, None), ("batch",), ("batch",), (None,),
    ]  # fmt: skip


def test_integers_of_a_key_are_told_where_there_may_be_some():
    with pytest.raises(BatchError, match="PRNGKey belongs to no row"):
        describe_batch({"x": np.ones((16, 4)), "rng": np.zeros(2, np.uint32)})
