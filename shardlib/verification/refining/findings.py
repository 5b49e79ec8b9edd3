"""What refinement changed, as findings and counts of the search: another plan than predicted, plans
that the compiler refuted, too few that survived.
"""

from __future__ import annotations

from shardlib.planning.decisions.compiled_trials import Refined, Trial
from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import seconds_text
from shardlib.report import Finding, diagnostic

#: Compilations for each plan that is wanted, at most.
COMPILATIONS = 3


def trial_name(trial: Trial) -> str:
    return f"{trial.mesh}{f' ({trial.summary})' if trial.summary else ''}"


def search_counts(plan: Plan, trials: tuple[Trial, ...]) -> tuple[tuple[str, int], ...]:
    """Outcomes of the search, with how many plans were compiled and how many of these the compiler
    refuted.
    """
    refuted = sum(not trial.survived for trial in trials)
    return (
        *plan.search.counts,
        ("compiled", len(trials)),
        *((("refuted", refuted),) if refuted else ()),
    )


@diagnostic
def refine_findings(record: Refined, chosen: int) -> list[Finding]:
    """What refinement changed: another plan than predicted, plans that were cut, the bound."""
    findings: list[Finding] = []
    first, best = record.trials[0], record.trials[chosen]
    if chosen and first.survived:
        findings.append(
            Finding(
                code="reranked",
                severity="info",
                message=(
                    f"{trial_name(first)} was predicted to be the fastest; by the compiler's"
                    f" figures it takes {seconds_text(first.compiled_seconds)} a step, and this"
                    " plan"
                    f" {seconds_text(best.compiled_seconds)}."
                ),
            )
        )
    cut = [trial.verdict for trial in record.trials if not trial.survived]
    if cut:
        reasons = ", ".join(f"{cut.count(reason)} {reason}" for reason in dict.fromkeys(cut))
        findings.append(
            Finding(
                code="refuted-plans",
                severity="info",
                message=(
                    f"the compiler refused {len(cut)} of the {len(record.trials)} plans that were"
                    f" compiled: {reasons}."
                ),
            )
        )
    survived = sum(trial.survived for trial in record.trials)
    if record.bounded or survived < record.wanted:
        why = (
            f"the bound of {COMPILATIONS} compilations for each was reached"
            if record.bounded
            else "there are no more candidates"
        )
        findings.append(
            Finding(
                code="refine-bound",
                severity="warning",
                message=f"{survived} of {record.wanted} wanted plans survived the compiler: {why}.",
                hint=(
                    "pin what saves memory, or look at what the compiler says about the plans it"
                    " refutes"
                    if record.bounded
                    else ""
                ),
            )
        )
    return findings
