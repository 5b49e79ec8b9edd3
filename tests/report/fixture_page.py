"""A page about a plan that is written out by hand, so that it looks the same whatever the planner
finds.
"""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from shardlib.layout import Collective, Layout, MeshShape
from shardlib.planner.answers import Answers, Kernels, KernelTime
from shardlib.planner.parts import ActivationLayout, Move, PricedPlan
from shardlib.report.pages import Evidence, html_report
from tests.planner.fixture_plan import GIB, PLAN

HELD = Layout("fsdp", "tensor", ())
ACTIVATIONS = (
    ActivationLayout(
        name="input of layers.mlp.up",
        shape=(16, 4096, 4096),
        dtype="bfloat16",
        colours=("batch", "seq", "embed"),
        held=HELD,
        count=3,
        moves=(
            Move(
                kind="all-gather",
                axes=("tensor",),
                of=("layers.mlp.up",),
                layout=Layout("fsdp", (), ()),
            ),
        ),
    ),
)
LANDSCAPE = tuple(
    PricedPlan(
        mesh=MeshShape(fsdp=2**k, tensor=16 // 2**k),
        decided=(("zero", str(zero)),),
        step_seconds=1.8 + 0.1 * k + 0.2 * zero,
        peak_bytes=(90 - 15 * zero - 5 * k) * GIB,
        fits=zero > 1,
    )
    for k in range(5)
    for zero in (1, 2, 3)
)
KERNELS = Kernels(
    chip="h100",
    peak_flops_per_s=(("bfloat16", 989e12),),
    bytes_per_s=3.35e12,
    kernels=tuple(
        KernelTime(
            name=name,
            kind="dot_general",
            phase=phase,
            dtype="bfloat16",
            count=10.0,
            flops=flops,
            bytes=flops / intensity,
            seconds=1.3 * max(flops / 989e12, flops / intensity / 3.35e12),
        )
        for name, phase, flops, intensity in (
            ("mlp/up", "forward", 4e14, 900.0),
            ("mlp/up", "backward", 8e14, 700.0),
            ("norm", "forward", 1e10, 0.5),
        )
    ),
)


def page() -> str:
    """The page."""
    plan = replace(PLAN, activations=ACTIVATIONS, search=replace(PLAN.search, landscape=LANDSCAPE))
    gathered = Collective(kind="all-gather", axes=("fsdp",), bytes=2**26, count=200, seconds=0.0)
    evidence = (
        Evidence(source="compiled", peak_bytes=50 * GIB, collectives=(gathered,)),
        Evidence(source="measured", step_seconds=1.9),
    )
    return html_report(plan, answers=Answers(kernels=KERNELS), evidence=evidence)


class Balance(HTMLParser):
    """Fails on a closing tag that does not match, and collects the text."""

    VOID = frozenset({"br", "img", "input", "link", "meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def text_of(html: str) -> str:
    """The text of a page, all of whose tags are closed."""
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return " ".join(parser.text)
