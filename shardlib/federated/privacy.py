"""What do rounds of noise cost? The epsilon of differential privacy, by `dp-accounting`.

Flower's wrappers (`DifferentialPrivacyServerSideFixedClipping` and others) clip the update of each
client to a norm C, and add noise of deviation z C / m to the mean over m clients: z is the noise
multiplier. They guard clients, not rows. All clients have to count alike (`Local(weight="equal")`),
and what is sent as metrics is guarded by nothing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from shardlib.errors import ArgumentError, MissingPackageError, raise_all
from shardlib.untrusted.shown import shown

#: Words of `sampling`.
SAMPLING = ("none", "poisson", "fixed")


def epsilon(
    noise_multiplier: float,
    rounds: int,
    *,
    delta: float,
    sampled: int = 1,
    clients: int = 1,
    sampling: str = "none",
) -> float:
    """The epsilon of (epsilon, delta) differential privacy of clients, by Renyi divergences."""
    _require(noise_multiplier, rounds, delta, sampled, clients, sampling)
    events, accounting, renyi = (
        _package(name) for name in ("dp_event", "privacy_accountant", "rdp.rdp_privacy_accountant")
    )
    relation = accounting.NeighboringRelation
    if sampling == "fixed":
        # Replacing one moves a sum by twice the norm.
        noise = events.GaussianDpEvent(noise_multiplier / 2)
        event = events.SampledWithoutReplacementDpEvent(clients, sampled, noise)
        accountant = renyi.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    else:
        event = events.GaussianDpEvent(noise_multiplier)
        if sampling == "poisson":
            event = events.PoissonSampledDpEvent(sampled / clients, event)
        accountant = renyi.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
    return float(accountant.compose(event, rounds).get_epsilon(delta))


def _require(
    noise_multiplier: float, rounds: int, delta: float, sampled: int, clients: int, sampling: str
) -> None:
    failures = [
        f"{name} is {shown(value)}; it is {rule}"
        for name, value, fine, rule in (
            ("noise_multiplier", noise_multiplier, noise_multiplier > 0, "a number of more than 0"),
            ("rounds", rounds, rounds >= 0, "an integer of at least 0"),
            ("delta", delta, 0 < delta < 1, "a number between 0 and 1"),
            ("sampled", sampled, 0 < sampled <= clients, f"1 to {clients}, the number of clients"),
            ("sampling", sampling, sampling in SAMPLING, f"one of {', '.join(SAMPLING)}"),
        )
        if not fine
    ]
    if failures:
        raise_all(ArgumentError, "epsilon cannot use its arguments", failures)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"dp_accounting.{name}")
    except ImportError as error:
        raise MissingPackageError(
            "epsilon needs the package dp-accounting\nTry: pip install 'shardlib[federated]'"
        ) from error
