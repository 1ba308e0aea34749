"""A drawn figure, its two files, and its form inside a page."""

import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from matplotlib.figure import Figure

from corun.bench.figures import style

DPI = 160
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure.

    section: the part of a report that it belongs to. stem: its files' name. number: the paper's
    figure. caption: what it shows.
    """

    section: str
    stem: str
    number: str
    title: str
    caption: str
    figure: Figure

    def svg(self) -> str:
        """The figure as an SVG document. The same data gives the same text."""
        text = StringIO()
        with style.styled():
            self.figure.savefig(text, format="svg", metadata=_NO_METADATA)
        return text.getvalue()

    def save(self, directory: Path) -> str:
        """Write STEM.png (on white) and STEM.svg (transparent), and return the SVG."""
        with style.styled():
            self.figure.savefig(directory / f"{self.stem}.png", dpi=DPI, facecolor="white")
        svg = self.svg()
        (directory / f"{self.stem}.svg").write_text(svg)
        return svg


def for_page(svg: str, prefix: str, label: str) -> str:
    """An SVG document as an element of an HTML page.

    Its text takes the page's colors (``currentColor``, ``--muted``, ``--grid``), its ids begin with
    `prefix`, so that several can share the page, and `label` is read aloud for it.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', _opening(label), body, count=1)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)
    colors = {style.INK: "currentColor", style.MUTED: "var(--muted)", style.GRID: "var(--grid)"}
    for fixed, themed in colors.items():
        body = body.replace(fixed, themed)
    return body


def _opening(label: str) -> str:
    quoted = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    quoted = quoted.replace("\\", r"\\")
    return rf'<svg viewBox="\1" role="img" aria-label="{quoted}">'
