"""Prints a VerifyReport for people."""

from rich import box
from rich.console import Console
from rich.table import Table

from corun.verify.compare import LENGTH, TOKEN, Divergence
from corun.verify.report import VerifyReport


def print_summary(report: VerifyReport, console: Console | None = None) -> None:
    """The counts by scenario, what was and was not exercised, the first difference, the verdict."""
    out = console or Console(highlight=False, soft_wrap=True)
    if report.results:
        out.print(_table(report))
    everything = report.comparison
    out.print(
        f"compared {everything.token_values:,} token ids ({everything.token_values_equal:,} equal) "
        f"and {everything.logprob_values:,} logprobs ({everything.logprob_values_equal:,} equal), "
        f"bit by bit; {report.alone} requests ran alone for reference; "
        f"the longest had {report.longest:,} tokens"
    )
    _print_coverage(report, out)
    _print_audit(report, out)
    for found in (everything.first, everything.first_token):
        if found is not None:
            _print_divergence(report, found, out)
        if everything.first is everything.first_token:
            break
    for failure in (*report.failures, *([report.error] if report.error else [])):
        out.print(failure, markup=False)
    out.print(f"policy {report.policy}: {report.verdict} ({report.seconds:.1f} s)")


def _table(report: VerifyReport) -> Table:
    table = Table(
        title=f"{report.model} on {report.device}, policy {report.policy}: "
        f"requests whose tokens and logprobs are equal to the bit",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("engine", justify="right")
    table.add_column("scenario")
    for name in ("tokens", "logprobs", "values", "rows", "aborts"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in report.results:
        counts = result.comparison
        table.add_row(
            str(result.engine),
            f"{result.suite}: {result.name}",
            f"{counts.tokens_equal}/{counts.requests}",
            f"{counts.logprobs_equal}/{counts.requests}",
            f"{counts.token_values + counts.logprob_values:,}",
            f"{result.least_rows}-{result.most_rows}",
            str(result.aborted),
        )
    return table


def _print_coverage(report: VerifyReport, out: Console) -> None:
    if report.limits is None:
        return
    crossings = report.crossings()
    done = [str(rows) for rows, why in crossings.items() if why is None]
    out.print(f"concurrent rows crossed: {', '.join(done) or 'none'}")
    for rows, why in crossings.items():
        if why is not None:
            out.print(f"not exercised: {rows} rows: {why}", markup=False)
    for text in report.left_out:
        out.print(f"not exercised: {text}", markup=False)


def _print_audit(report: VerifyReport, out: Console) -> None:
    for audit in report.audits:
        steps = ", ".join(f"{count:,} {kind}" for kind, count in audit.steps.items())
        out.print(
            f"engine {audit.engine}: {steps} steps, {len(audit.violations)} outside the plan; "
            f"domain {audit.domain}"
        )
        for violation in audit.violations[:5]:
            out.print(f"  {violation}", markup=False)


def _print_divergence(report: VerifyReport, found: Divergence, out: Console) -> None:
    what = "token" if found.kind in (TOKEN, LENGTH) else found.kind.replace("_", " ")
    out.print(
        f"first different {what}: request {found.request}, completion {found.sample}, "
        f"step {found.step}",
        markup=False,
    )
    for side, value in (("alone", found.reference), ("beside others", found.observed)):
        token = value.get("token_id")
        text = "" if token is None else f" {report.words([token])!r}"
        shown = ", ".join(f"{name} {v}" for name, v in value.items())
        out.print(f"  {side}: {shown}{text}", markup=False)
    if found.tokens_before:
        out.print(f"  text so far: {report.words(found.tokens_before)!r}", markup=False)
