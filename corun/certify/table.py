"""A certificate as a table that people can read: the paper's Table I, as measured here."""

from typing import Any

from corun.certify import planner
from corun.certify.certificate import Certificate, RowClaim
from corun.certify.compositions import WORDS

MOST_TEXT = 90


def show(certificate: Certificate, engine: planner.Engine, console: Any) -> None:
    """Print what was measured, and why each policy is or is not allowed for `engine`.

    console: rich's Console.
    """
    from rich.table import Table

    domain = certificate.domain
    console.print(f"[bold]{domain['device']}[/bold], {domain['dtype']}, model {domain['model']}")
    rows = Table("operation", "classes", "row counts of equal bits", "values compared")
    for claim in certificate.rows:
        rows.add_row(claim.name, str(len(claim.classes)), _classes(claim), f"{claim.values:,}")
    console.print(rows)
    steps = Table("steps", "operation", "equal", "trials", "values compared")
    for step in certificate.steps:
        steps.add_row(
            WORDS[step.name],
            step.operation,
            "yes" if step.holds else f"no: {step.example}",
            str(step.trials),
            f"{step.values:,}",
        )
    console.print(steps)
    if check := certificate.engine:
        verdict = "every bit equal" if check.equal else f"DIFFERS: {check.example}"
        console.print(
            f"whole engine: {check.tokens:,} tokens and {check.logprobs:,} logprobs: {verdict}"
        )
    for verdict_ in planner.verdicts(certificate, engine):
        mark = "[green]allowed[/green]" if verdict_.allowed else "[red]not allowed[/red]"
        console.print(f"{verdict_.policy}: {mark}: {verdict_.reason}", highlight=False)


def _classes(claim: RowClaim) -> str:
    texts = [str(c) for c in claim.classes]
    if claim.variant.ranges:
        texts.append(f"depends on place: {claim.variant}")
    return " | ".join(t if len(t) <= MOST_TEXT else t[:MOST_TEXT] + "..." for t in texts)
