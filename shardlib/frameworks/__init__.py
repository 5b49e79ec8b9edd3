"""Plans for other training frameworks: facts about them, with their sources, and their
configurations.

profiles/NAME.json          a profile that plans are priced as
curves/CHIP.PROFILE.json    the efficiency of a chip under it
abilities/NAME.json         the decisions that a framework can implement, and its profiles
configurations.py           the configuration of a plan in the form of its framework

Profiles of older releases, and of frameworks without abilities, can also be named.

>>> megatron = framework_profile("megatron-core")
>>> megatron.attention, FrameworkProfile.from_json(megatron.to_json()) == megatron
('fused', True)
>>> framework("torchtitan", "nvidia").abilities.zero
(0, 3)
>>> framework("maxtext", "google").profile, framework("maxtext", "nvidia").profile
('maxtext-tpu', 'maxtext-gpu')
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources

from shardlib.cost.framework import XLA, Framework, FrameworkProfile
from shardlib.cost.roofline import Curve, read_curves
from shardlib.errors import PinError
from shardlib.untrusted.data import construct


@lru_cache(maxsize=1)
def framework_profiles() -> Mapping[str, FrameworkProfile]:
    """The framework profiles shipped with shardlib, by name, with `XLA`."""
    folder = resources.files("shardlib.frameworks") / "profiles"
    loaded = [
        FrameworkProfile.from_json(json.loads(file.read_text(encoding="utf-8")))
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {
        XLA.name: XLA,
        **{profile.name: profile for profile in sorted(loaded, key=lambda profile: profile.name)},
    }


def framework_profile(name: str) -> FrameworkProfile:
    """The framework profile with this name."""
    profiles = framework_profiles()
    if name not in profiles:
        raise PinError(
            f"framework profile {name!r} is unknown; framework profiles are {', '.join(profiles)}"
        )
    return profiles[name]


@lru_cache(maxsize=1)
def curves() -> Mapping[tuple[str, str], Curve]:
    """The curves of chips under framework profiles other than `XLA`, by chip and profile."""
    return read_curves(resources.files("shardlib.frameworks") / "curves")


@lru_cache(maxsize=1)
def frameworks() -> Mapping[str, Framework]:
    """The frameworks that have files, by name."""
    folder = resources.files("shardlib.frameworks") / "abilities"
    loaded = [
        construct(Framework, json.loads(file.read_text(encoding="utf-8")), file.name, PinError)
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {entry.name: entry for entry in sorted(loaded, key=lambda entry: entry.name)}


def framework(name: str, vendor: str) -> Framework:
    """The framework with this name, for the chips of a vendor."""
    known_frameworks = frameworks()
    if name in known_frameworks:
        entry = known_frameworks[name]
        profile = dict(entry.profiles).get(vendor)
        if profile is None:
            raise PinError(
                f"framework {name!r} runs on chips of {' and '.join(dict(entry.profiles))}, and"
                f" these are of {vendor}\nTry: {_others(vendor)}"
            )
        return replace(entry, profile=profile)
    if name in framework_profiles() and name != XLA.name:
        family = next(
            (entry for entry in known_frameworks.values() if name in entry.releases),
            Framework(name=name),
        )
        vendors = dict(family.profiles)
        if vendors and vendor not in vendors:
            raise PinError(
                f"framework {name!r} runs on chips of {' and '.join(vendors)}, and these are of"
                f" {vendor}\nTry: {_others(vendor)}"
            )
        return replace(family, name=name, profile=name)
    names = [
        *known_frameworks,
        *(
            profile_name
            for profile_name in framework_profiles()
            if profile_name not in known_frameworks
        ),
    ]
    names.remove(XLA.name)
    near = difflib.get_close_matches(name.lower(), names, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise PinError(f"framework {name!r} is unknown{meant} (frameworks are {', '.join(names)})")


def _others(vendor: str) -> str:
    """A hint for a framework that does not run on the chips of a vendor."""
    able = [entry.name for entry in frameworks().values() if vendor in dict(entry.profiles)]
    if able:
        return " or ".join(able)
    return "a machine with chips that it runs on, or no framework for programs of shardlib"
