"""Bytes between islands, against what was published for the same models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from shardlib.islands.exchanges import Compressed, DiLoCo, PowerSGD, TopK
from shardlib.islands.planning import _each, moved
from shardlib.layout import Layout, MeshShape
from shardlib.planner.plan import ParameterLayout

Shape = tuple[int, ...]
ONE = MeshShape()


def named(shapes: Sequence[Shape]) -> list[ParameterLayout]:
    """Parameters that are whole on their device, kernels of convolutions as Flax has them."""
    return [
        ParameterLayout(
            path=str(number),
            shape=shape,
            dtype="float32",
            colours=("features",) * len(shape),
            compute=(whole := Layout.replicated(len(shape))),
            rest=whole,
            gradient=whole,
            state=whole,
        )
        for number, shape in enumerate(shapes)
    ]


def resnet18() -> list[Shape]:
    """ResNet-18 for CIFAR-10 (He et al., arXiv:1512.03385; 3 x 3 at the entry): 11.2 M numbers."""
    found: list[Shape] = [(3, 3, 3, 64), (64,), (64,)]
    width = 64
    for out in (64, 128, 256, 512):
        for block in range(2):
            first = width if block == 0 else out
            found += [(3, 3, first, out), (out,), (out,), (3, 3, out, out), (out,), (out,)]
            if first != out:
                found += [(1, 1, first, out), (out,), (out,)]
        width = out
    return [*found, (512, 10), (10,)]


@pytest.mark.parametrize(("rank", "times"), [(1, 243), (2, 136), (4, 72)])
def test_power_sgd_sends_as_much_less_as_published(rank: int, times: float) -> None:
    """Vogels et al., arXiv:1905.13727, table 3 and appendix (ResNet-18): 243, 136 and 72 times."""
    shapes = resnet18()
    every = sum(map(math.prod, shapes))
    assert every == 11_173_962
    exchange = Compressed(by=PowerSGD(rank=rank))
    sent = sum(size for _, _, size, _ in moved(named(shapes), ONE, exchange, 0))
    assert 4 * every / sent == pytest.approx(times, rel=0.02)


def test_the_largest_of_a_thousand_are_fewer_bytes_than_published() -> None:
    """Lin et al., arXiv:1712.01887: 277 times for ResNet-50 (25.6 M numbers), all told; a number and
    its place are 8 bytes here, which is 500 times.
    """
    numbers = 25_557_032
    exchange = Compressed(by=TopK(density=0.001))
    ((kind, _, size, _),) = moved(named([(numbers,)]), ONE, exchange, 0)
    assert kind == "all-gather" and 4 * numbers / (size / exchange.islands) >= 277


@pytest.mark.parametrize(
    ("every", "wire", "times"), [(500, "float32", 500), (100, "int8", 400), (100, "float32", 100)]
)
def test_meetings_move_as_much_less_as_published(every: int, wire: str, times: float) -> None:
    """arXiv:2311.08105 (500 times), INTELLECT-1, arXiv:2412.01152 (every 100 steps in int8: 400
    times). An all-reduce of N bytes is an all-to-all and an all-gather of N on the wire.
    """
    shape = (4096, 4096)
    exchange = DiLoCo(every=every, wire=wire)
    ((crossing, _),) = _each(named([shape]), ONE, exchange)
    wires = sum(size * (2 if kind == "all-reduce" else 1) for kind, _, size, _ in crossing)
    assert every * 2 * 4 * math.prod(shape) / wires == pytest.approx(times, rel=0.02)
