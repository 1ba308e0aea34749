"""The findings of ``corun doctor``, for people."""

from pathlib import Path
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
        *(_certificate_row(c) for c in findings["certificates"]),
        *_model_row(policy),
        ("policy", _policy_words(policy), policy["reason"]),
        *((name, value, "") for name, value in findings["variables"].items()),
        *((h["name"], h["value"], h["advice"]) for h in findings["hazards"]),
    ]


def _policy_words(policy: dict[str, Any]) -> str:
    undecided = policy["asked"] == "auto" and not policy["model"]
    return f"{policy['asked']} -> {policy['runs'] or ('it depends' if undecided else '-')}"


def _model_row(policy: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The model and its certificate, where a model was given."""
    if not policy["model"]:
        return []
    remark = ""
    if file := policy["certificate"]:
        remark = f"its certificate: {file}"
    elif policy["runs"] not in (None, "off"):
        remark = "no kept certificate is of this engine"
    return [("model", policy["model"], remark)]


def _certificate_row(kept: dict[str, Any]) -> tuple[str, str, str]:
    name = Path(kept["file"]).name
    if kept["error"]:
        return "kept certificate", name, f"of no use: {kept['error']}"
    remark = f"{kept['dtype']}, {kept['device']}; allows {', '.join(kept['allows']) or 'nothing'}"
    if kept["differs"]:
        remark += f"; not for this machine: other {' and '.join(kept['differs'])}"
    return "kept certificate", f"{kept['model']} ({name})", remark


def show(findings: dict[str, Any], console: Console | None = None) -> None:
    """Print the findings as a table, then the problems."""
    console = console or Console()
    table = Table("", "found", "remark", title="corun doctor", title_justify="left")
    for row in _rows(findings):
        # Text: what was found may look like markup.
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    console.print(table)
    for seam in (s for s in findings["seams"] if not s["found"]):
        line = f"missing: {seam['module']} {seam['name']} ({seam['holder']}): {seam['detail']}"
        console.print(Text(line))
    for problem in findings["problems"]:
        console.print(Text(f"problem: {problem}"))
    console.print("CoRun can run here." if findings["can_run"] else "CoRun cannot run here.")
