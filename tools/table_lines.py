"""The lines of Markdown tables."""

from collections.abc import Iterable


def row(cells: Iterable[str]) -> str:
    """One row of a table."""
    return "| " + " | ".join(cells) + " |"


def head(*names: str) -> list[str]:
    """The first two lines of a table: the names of its columns, and the rule below them."""
    return [row(names), "|---" * len(names) + "|"]


def notes(texts: Iterable[str]) -> list[str]:
    """What stands below a table, as a list with an empty line before it; nothing for no texts."""
    lines = [f"- {text}" for text in texts]
    return ["", *lines] if lines else []
