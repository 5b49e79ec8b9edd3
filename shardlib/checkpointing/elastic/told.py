"""What a checkpoint becomes that goes on as other islands, in words."""

from __future__ import annotations

from shardlib.checkpointing.elastic.source import Source
from shardlib.checkpointing.islands.form import State, has_outer, islands_of
from shardlib.exchanges.values import DiLoCo
from shardlib.report import Finding


def keeps(state: State) -> bool:
    """Whether parameters are outer in a state."""
    return has_outer(state)


def told(source: Source, wanted: State, *, new_optimizer: bool) -> Finding:
    """A finding that says what a checkpoint becomes."""
    before, after = source.islands, islands_of(wanted)
    of = "one island" if before == 1 else f"{before} islands"
    goes_on = f"goes on as {after}" if before != after else "goes on as islands that meet otherwise"
    sentences = [f"The checkpoint of step {source.about.step} is of {of} and {goes_on}."]
    if before == 1:
        sentences.append("All start from its parameters and its optimizer.")
    else:
        sentences.append(f"They start from {_start(source)}.")
    if before > 1 and not new_optimizer:
        sentences.append("Moments of optimizers are means.")
    if keeps(wanted):
        sentences.append(f"The outer momentum {'is kept' if source.keeps else 'starts at zero'}.")
    if after > before:
        sentences.append(f"Random streams of islands from number {before + 1} on are new.")
    return Finding(
        code="other-number-of-islands" if before != after else "other-exchange",
        severity="warning",
        where="exchange",
        message=" ".join(sentences),
    )


def _start(source: Source) -> str:
    """Where islands start: how far back their last meeting is, where that is known."""
    if not source.keeps:
        return "the mean of the islands' parameters"
    plan, _ = source.about.read_plan()
    exchange = plan.exchange if plan is not None else None
    lost = ""
    if isinstance(exchange, DiLoCo) and exchange.fragments > 1:
        lost = "; what islands did since a parameter met is left out"
    elif isinstance(exchange, DiLoCo) and (since := source.about.step % exchange.every):
        lost = f", {since} steps ago: what islands did since is left out"
    return f"the outer parameters, those of the last meeting{lost}"
