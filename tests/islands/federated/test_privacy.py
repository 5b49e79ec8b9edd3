"""Epsilon of rounds of noise, against closed forms and against Flower's own accountant."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest

import shardlib
from shardlib.islands import federated

pytestmark = pytest.mark.unit
installed = importlib.util.find_spec("dp_accounting") is not None
needs = pytest.mark.skipif(not installed, reason="the package dp-accounting is not installed")


def of_gaussians(z: float, rounds: int, delta: float, q: float = 1.0) -> float:
    """Renyi divergences of Gaussians, of Poisson samples at integer orders, and Proposition 12 of
    arXiv:2004.00010.
    """
    best = math.inf
    for a in 1 + np.arange(1, 2000) / 100 if q == 1 else range(2, 400):
        renyi = a / (2 * z**2) if q == 1 else sampled_gaussian(z, q, int(a))
        said = rounds * renyi + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)
        best = min(best, said)
    return best


def sampled_gaussian(z: float, q: float, order: int) -> float:
    """Equation 3 of arXiv:1908.10530."""
    k = np.arange(order + 1)
    logs = [math.lgamma(order + 1) - math.lgamma(i + 1) - math.lgamma(order - i + 1) for i in k]
    terms = logs + k * math.log(q) + (order - k) * math.log1p(-q) + (k**2 - k) / (2 * z**2)
    return float(np.logaddexp.reduce(terms)) / (order - 1)


@needs
@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (1.1, 50), (4.0, 200)])
def test_epsilon_is_that_of_gaussians(z: float, rounds: int) -> None:
    found = federated.epsilon(z, rounds, delta=1e-5)
    assert found == pytest.approx(of_gaussians(z, rounds, 1e-5), rel=0.02)
    sampled = federated.epsilon(z, rounds, delta=1e-5, sampled=10, clients=1000, sampling="poisson")
    exact = of_gaussians(z, rounds, 1e-5, 0.01)
    assert 0.99 * exact < sampled < 1.06 * exact  # of fewer orders
    fixed = federated.epsilon(z, rounds, delta=1e-5, sampled=10, clients=1000, sampling="fixed")
    assert fixed > sampled  # of replaced clients, whose sums are twice as far apart


@needs
def test_all_of_a_fixed_sample_are_gaussians_of_half_the_noise() -> None:
    found = federated.epsilon(2.0, 7, delta=1e-5, sampled=5, clients=5, sampling="fixed")
    assert found == pytest.approx(of_gaussians(1.0, 7, 1e-5), rel=0.02)


@needs
@pytest.mark.parametrize(
    ("sampling", "relation", "factor"),
    [
        ("none", "add-or-remove-one", 1),
        ("poisson", "add-or-remove-one", 1),
        ("fixed", "replace-one", 2),
    ],
)
def test_epsilon_is_that_of_flowers_accountant(sampling: str, relation: str, factor: int) -> None:
    pytest.importorskip("flwr", reason="the package flwr is not installed")
    from flwr.supercore import privacy_accounting as flower
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    words = {"none": "no-amplification", "fixed": "without-replacement"}
    accountant = RdpAccountant(
        flower.PrivacyConfig(
            target_delta=1e-5,
            population_size=200,
            neighboring_relation=flower.NeighboringRelation(relation),
            sampling_method=flower.SamplingMethod(words.get(sampling, sampling)),
        )
    )
    event = flower.GaussianPrivacyEvent(
        noise_multiplier=1.2 / factor, sample_size=20, population_size=200
    )
    accountant.compose(event, 30)
    found = federated.epsilon(1.2, 30, delta=1e-5, sampled=20, clients=200, sampling=sampling)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_bad_figures_are_listed() -> None:
    given: Any = {"delta": 2, "sampled": 3, "clients": 2, "sampling": "half"}
    with pytest.raises(shardlib.ArgumentError) as error:
        federated.epsilon(0, -1, **given)
    assert [
        word
        for word in ("noise_multiplier", "rounds", "delta", "sampled", "sampling")
        if word not in str(error.value)
    ] == []


@pytest.mark.skipif(installed, reason="dp-accounting is installed")
def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(shardlib.MissingPackageError, match=r"pip install 'shardlib\[federated\]'"):
        federated.epsilon(1.0, 1, delta=1e-5)
