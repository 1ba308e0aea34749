"""Prints the quickstart's comparison for people."""

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from corun.quickstart.measure import Measured, Split

MOST_BEFORE, MOST_AFTER = 160, 200  # characters shown of a text before and after it splits


def table(plain: Measured, corun: Measured) -> Table:
    """One row for each engine."""
    made = Table(title=f"{plain.requests} chat requests: each one alone, then all at once")
    made.add_column("engine")
    made.add_column("same tokens", justify="right")
    made.add_column("same logprobs", justify="right")
    made.add_column("logprobs equal, bit by bit", justify="right")
    for name, measured in (("plain vLLM", plain), (f"CoRun ({corun.policy})", corun)):
        c = measured.comparison
        made.add_row(
            name,
            _share(c.tokens_equal, c.requests),
            _share(c.logprobs_equal, c.requests),
            _share(c.logprob_values_equal, c.logprob_values),
        )
    return made


def _share(equal: int, of: int) -> Text:
    return Text(f"{equal:,} of {of:,}", style="green" if equal == of else "red")


def split_panel(split: Split) -> Panel:
    """Where plain vLLM's two answers to one question part."""
    before = " ".join(split.before.split())
    if len(before) > MOST_BEFORE:
        before = "… " + before[-MOST_BEFORE:]
    grid = Table.grid(padding=(0, 2))
    grid.add_row("[bold]question", Text(split.question))
    if before:
        grid.add_row("[bold]both", Text(before))
    grid.add_row("[bold]alone", Text(_shorten(split.alone), "cyan"))
    grid.add_row("[bold]in crowd", Text(_shorten(split.crowd), "magenta"))
    title = f"plain vLLM: the same request, another answer from token {split.token} on"
    return Panel(grid, title=title, title_align="left")


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MOST_AFTER else flat[:MOST_AFTER] + " …"


def verdict(plain: Measured, corun: Measured) -> str:
    """What the comparison means, in a few sentences."""
    sentences = []
    if plain.comparison.identical:
        sentences.append("Plain vLLM happened to keep every bit this time.")
    elif plain.split is None:
        sentences.append("Plain vLLM kept the text this time, but not the logprobs.")
    if corun.kept:
        sentences.append(
            f"CoRun kept every bit of {corun.comparison.logprob_values:,} logprobs and "
            f"{corun.comparison.token_values:,} tokens; all of its {corun.steps:,} engine steps "
            f"were inside the plan. Domain: {corun.domain}."
        )
    elif corun.violations:
        sentences.append(f"CoRun ran {corun.violations} steps outside its plan.")
    else:
        sentences.append(
            f"CoRun did not keep the contract: {corun.comparison.differing} requests differed. "
            f"Please report this together with the output of `corun doctor`."
        )
    return " ".join(sentences)


def show(console: Console, plain: Measured, corun: Measured) -> None:
    """Prints the table, the split in plain vLLM's text, and the verdict."""
    console.print(table(plain, corun))
    if plain.split is not None:
        console.print(split_panel(plain.split))
    console.print(verdict(plain, corun), highlight=False, style=None if corun.kept else "bold red")
