"""Values of other kinds than a decision has are read as what they stand for, or refused."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.decisions.pins import Pins, aliased
from shardlib.errors import PinError

READ = (
    ({"zero": np.int64(2)}, {"zero": 2}),
    ({"sequence_parallel": np.True_}, {"sequence_parallel": True}),
    ({"mesh.tp": 2, "mesh.tensor": np.int64(2)}, {"axes": (("tensor", 2),)}),
    ({"tensor": 2, "tp": 2}, {"axes": (("tensor", 2),)}),
    ({"context": 2}, {"axes": (("context", 2),)}),
    ({"moment_dtype": jnp.bfloat16}, {"dtypes": (("moment_dtype", "bfloat16"),)}),
    ({"dtypes": {"param_dtype": np.float32}}, {"dtypes": (("param_dtype", "float32"),)}),
    ({"matmul_dtype": jnp.dtype("bfloat16")}, {"dtypes": (("matmul_dtype", "bfloat16"),)}),
    ({"allow": {"moment_dtype": jnp.bfloat16}}, {"allow": (("moment_dtype", ("bfloat16",)),)}),
    (
        {"allow": {"moment_dtype": [np.dtype("float16"), jnp.bfloat16]}},
        {"allow": (("moment_dtype", ("float16", "bfloat16")),)},
    ),
)
REFUSED = (
    ({"zero": np.array(3)}, "zero is array(3); it is one of 0, 1, 2, 3"),
    ({"zero": np.array([])}, "it is one of 0, 1, 2, 3"),
    ({"zero": 1 + 0j}, "zero is (1+0j)"),
    ({"zero": 3.0}, "zero is 3.0"),
    ({"zero": Fraction(3)}, "zero is Fraction(3, 1)"),
    ({"zero": np.True_}, "it is one of 0, 1, 2, 3"),
    ({"sequence_parallel": 1}, "it is one of False, True"),
    ({"sequence_parallel": np.array([2, 4])}, "it is one of False, True"),
    ({"remat": np.array("full")}, "it is one of 'none', 'dots', 'full'"),
    ({"remat": "ful"}, "did you mean 'full'?"),
    ({"schedule": "1F1B"}, "did you mean '1f1b'?"),
    ({"remat": "x" * 5000}, "xxxx...xxxx"),
    ({"rules": np.array(2)}, "sharding rules are array(2); they are a list of pairs"),
    ({"mesh": {1: 2}}, "1 is no mesh axis"),
    ({"mesh.tp": 2, "mesh.tensor": 4}, "mesh.tensor=4 contradicts mesh.tensor=2"),
    ({"tensor": 2, "mesh.tensor": 4}, "mesh.tensor=4 contradicts mesh.tensor=2"),
    ({"moment_dtype": np.int32}, "it is one of float32, bfloat16, float16"),
    ({"moment_dtype": np.zeros(2, np.float32)}, "it is one of float32, bfloat16, float16"),
    ({"moment_dtype": dict}, "moment_dtype is <class 'dict'>; it is one of float32"),
    ({"mesh": {"data": 0}}, "pins are not usable: mesh axis 'data' has size 0"),
    ({"rules": [("a", "tenser")]}, "pins are not usable: rules: 'a' -> 'tenser' is no mesh axis"),
    ("zero=3", "pins are a mapping such as {'zero': 3}"),
)


@pytest.mark.parametrize(("given", "meant"), READ, ids=str)
def test_what_stands_for_a_value_is_that_value(given: dict[str, Any], meant: dict[str, Any]):
    found = dict(Pins.parse(given).given)
    assert found == meant and [type(one) for one in found.values()] == [
        type(one) for one in meant.values()
    ]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_stands_for_none_is_refused_in_words(given: Any, says: str):
    with pytest.raises(PinError, match=re.escape(says)) as refused:
        Pins.parse(given)
    assert len(str(refused.value)) < 400


def test_two_keywords_of_one_axis_agree_or_are_refused():
    assert aliased({"tp": 2, "tensor": 2}) == {"mesh.tensor": 2}
    with pytest.raises(PinError, match="tensor=4 contradicts"):
        aliased({"tp": 2, "tensor": 4})
