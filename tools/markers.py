"""Fills the parts of a document that scripts write, between a ``begin`` and an ``end`` comment."""

import re
from pathlib import Path

MARKER = re.compile(r"<!-- ([a-z-]+):(begin|end) -->")


def names(text: str) -> list[str]:
    """The names of a document's parts, in order. ValueError where its markers do not pair up."""
    found = MARKER.findall(text)
    begins, ends = found[::2], found[1::2]
    if [(name, "end") for name, kind in begins if kind == "begin"] != ends:
        raise ValueError(f"markers do not come in pairs of begin and end: {found}")
    made = [name for name, _ in begins]
    if len(set(made)) != len(made):
        raise ValueError(f"a part occurs twice: {made}")
    return made


def fill(text: str, name: str, body: str) -> str:
    """The document `text` with `body` as its part `name`. ValueError where it has no such part."""
    if name not in names(text):
        raise ValueError(f"no part <!-- {name}:begin --> in the document")
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{body.rstrip()}\n{end}{after}"


def fill_file(path: Path, name: str, body: str) -> None:
    """`fill` for a file, in place."""
    path.write_text(fill(path.read_text(encoding="utf-8"), name, body), encoding="utf-8")
