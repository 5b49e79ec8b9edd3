"""The framework profiles that shardlib knows: XLA's, and those of published training runs.

`XLA` is the default and changes nothing; the others are data, `framework_profiles/NAME.json`, every
fact with its source.

>>> XLA.attention, framework_profile("megatron-core").attention
('traced', 'fused')
>>> megatron = framework_profile("megatron-core")
>>> FrameworkProfile.from_json(megatron.to_json()) == megatron
True
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources

from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.errors import PinError

#: Rows that messages of the lowered exchange of tokens have room for, over those of an even
#: routing; what does not fit takes another round.
EXCHANGE_ROOM = 1.25


def gathers(profile: FrameworkProfile) -> tuple[str, ...]:
    """When a stage of a pipeline may gather weights that are stored sharded: the single programs
    that plans are lowered to leave that open.
    """
    return (
        ("use", "once")
        if profile.pipeline == "lockstep" and profile.stage_gathers == "use"
        else ("use",)
    )


def ends_on_all_stages(profile: FrameworkProfile) -> bool:
    """Whether the devices of all stages compute embedding and head, each for a part of the
    sequence: pipelines in one program do. Otherwise the first and the last stage do.
    """
    return profile.pipeline == "lockstep" and profile.embedding_and_head == "spread"


#: One program of JAX, compiled by XLA: the default, with nothing beside what is traced.
XLA = FrameworkProfile(
    name="xla",
    reduction="last",
    routed_saves="rows",
    exchange_room=EXCHANGE_ROOM,
    gathered_inputs="shared",
    sources=(
        "openxla/xla: what is traced is what runs",
        "exchange_room, routed_saves: shardlib.lowering.experts",
        "gathered_inputs: shardlib.lowering.reading.contractions, of equal pins XLA makes one",
        "reduction: shardlib.lowering.accumulation.deferred_reduction",
    ),
)


@lru_cache(maxsize=1)
def framework_profiles() -> Mapping[str, FrameworkProfile]:
    """The framework profiles that come with shardlib, by name."""
    folder = resources.files("shardlib.cost") / "framework_profiles"
    loaded = [
        FrameworkProfile.from_json(json.loads(file.read_text(encoding="utf-8")))
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {
        XLA.name: XLA,
        **{profile.name: profile for profile in sorted(loaded, key=lambda profile: profile.name)},
    }


def framework_profile(name: str | FrameworkProfile) -> FrameworkProfile:
    """The framework profile of a name; a `FrameworkProfile` is returned as it is."""
    if isinstance(name, FrameworkProfile):
        return name
    profiles = framework_profiles()
    if name not in profiles:
        raise PinError(
            f"framework profile {name!r} is unknown; framework profiles are {', '.join(profiles)}"
        )
    return profiles[name]
