"""The training frameworks that plans can be made for: what they are priced as, and can do.

Each is a file, `shardlib/cost/frameworks/NAME.json`, every fact with its source. Profiles of older
releases, and of frameworks that have no such file, can be named too.

>>> framework("torchtitan", "nvidia").able.zero
(0, 3)
>>> framework("maxtext", "google").profile, framework("maxtext", "nvidia").profile
('maxtext-tpu', 'maxtext-gpu')
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from shardlib.cost.terms.abilities import ANYTHING, Abilities
from shardlib.cost.terms.framework_profiles import XLA, framework_profiles
from shardlib.errors import PinError
from shardlib.untrusted import construct


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training framework.

    Attributes:
        name: what people call it.
        profile: name of the profile that it is priced as, on the chips that were asked for.
        profiles: (vendor, profile) pairs.
        releases: other profiles of the same framework, which can do the same.
        emits: form of its configuration (`shardlib.planning.emission`); "" where none is written.
        release: the release whose options are written.
        param_dtype: dtype of stored parameters; "" as the model has them.
        able: what it can do.
        sources: where the facts come from.
    """

    name: str
    profile: str = ""
    profiles: tuple[tuple[str, str], ...] = ()
    releases: tuple[str, ...] = ()
    emits: str = ""
    release: str = ""
    param_dtype: str = ""
    able: Abilities = ANYTHING
    sources: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def frameworks() -> Mapping[str, Framework]:
    """The frameworks that have files, by name."""
    folder = resources.files("shardlib.cost") / "frameworks"
    loaded = [
        construct(Framework, json.loads(file.read_text(encoding="utf-8")), file.name, PinError)
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {entry.name: entry for entry in sorted(loaded, key=lambda entry: entry.name)}


def framework(name: str, vendor: str) -> Framework:
    """The framework of a name, on the chips of a vendor."""
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
    """What to try where a framework does not run on the chips of a vendor."""
    able = [entry.name for entry in frameworks().values() if vendor in dict(entry.profiles)]
    if able:
        return " or ".join(able)
    return "a machine with chips that it runs on, or no framework for programs of shardlib"
