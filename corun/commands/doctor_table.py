"""The findings of ``corun doctor``, for people."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def _mark(good: bool) -> str:
    return "ok" if good else "PROBLEM"


def _rows(findings: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, found, remark)."""
    vllm, plugin, policy = findings["vllm"], findings["plugin"], findings["policy"]
    seams = findings["seams"]
    found = sum(s["found"] for s in seams)
    if not vllm["version"]:
        tested = "not installed"
    else:
        tested = "tested with CoRun" if vllm["tested"] else "not tested with CoRun"
    if plugin["blocked"]:
        loaded = "kept out by VLLM_PLUGINS"
    elif plugin["installed"]:
        loaded = "vLLM loads it by itself"
    else:
        loaded = "vLLM does not find it"
    return [
        ("corun", findings["corun"], ""),
        ("python", findings["python"], ""),
        ("torch", findings["torch"] or "-", ""),
        ("vLLM", vllm["version"] or "-", tested),
        ("device", findings["device"]["name"] or "-", findings["device"]["type"] or ""),
        ("plugin", "installed" if plugin["installed"] else "not installed", loaded),
        ("seams", f"{found} of {len(seams)} found", _mark(found == len(seams) and bool(seams))),
        ("policy", f"{policy['asked']} -> {policy['runs'] or '-'}", policy["reason"]),
        *((name, value, "") for name, value in findings["variables"].items()),
        *((h["name"], h["value"], h["advice"]) for h in findings["hazards"]),
    ]


def show(findings: dict[str, Any], console: Console | None = None) -> None:
    """Print the findings as a table, then the problems."""
    console = console or Console()
    table = Table("", "found", "remark", title="corun doctor", title_justify="left")
    for row in _rows(findings):
        table.add_row(*(Text(cell) for cell in row))  # Text: no markup in what was found
    console.print(table)
    for seam in (s for s in findings["seams"] if not s["found"]):
        line = f"missing: {seam['module']} {seam['name']} ({seam['holder']}): {seam['detail']}"
        console.print(Text(line))
    for problem in findings["problems"]:
        console.print(Text(f"problem: {problem}"))
    console.print("CoRun can run here." if findings["can_run"] else "CoRun cannot run here.")
