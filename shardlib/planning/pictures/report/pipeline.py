"""When each stage of a pipeline does what, as a picture of its own style inside of a page."""

from __future__ import annotations

import base64
from html import escape

from shardlib.errors import PlanError
from shardlib.planning.pictures.timelines import timeline_svg
from shardlib.planning.plan import Plan
from shardlib.planning.text.predicted_timeline import predicted
from shardlib.schedules.table import named

#: Slices that are drawn: a picture of more takes longer to open than to understand.
_MOST = 2500


def pipeline_picture(plan: Plan) -> str:
    """The timeline of a plan with stages; empty where it has none, or too much happens to draw."""
    if not named(plan.schedule).staged:
        return ""
    try:
        timeline = predicted(plan)
    except PlanError:
        return ""
    if len(timeline.slices) > _MOST:
        return (
            f'<p class="soft">The pipeline has {len(timeline.slices):,} slices a step, more than a'
            " page draws: shardlib timeline plan.json --svg timeline.svg</p>"
        )
    image = base64.b64encode(timeline_svg(timeline).encode()).decode()
    caption = escape(str(timeline).strip().splitlines()[-1])
    return (
        f'<figure><img alt="{escape(timeline.title)}. {caption}" style="width: 100%"'
        f' src="data:image/svg+xml;base64,{image}"><figcaption class="soft">{caption}</figcaption>'
        "</figure>"
    )
