"""Tables of certificates, as ``corun certify --json`` writes them."""

from recorded import DEFAULT_RUNNER, Record, Records, runner
from table_lines import head, notes, row

NOT_CHECKED = "not checked"
_WITHHELD = "not allowed: "
"""In the reason why ``certified`` is allowed: what of it is not."""


def certificate_table(records: Records, link: str) -> str:
    """What the certificates hold, a line each. link: what their directory is called in links."""
    lines = head(
        "model, device",
        "shape classes",
        "step properties that hold",
        "values compared",
        "whole engine",
        "seconds",
        "allowed",
    )
    for file, record in records.items():
        certificate = record["certificate"]
        values = sum(c["values"] for c in (*certificate["rows"], *certificate["steps"]))
        cells = (
            f"[{_model(record)}]({link}/{file}), {_dtype(record)}, {_device(record)}",
            _classes(certificate),
            _properties(certificate),
            f"{values:,}",
            _engine_check(certificate),
            f"{record['seconds']:.1f}",
            _allowed(record),
        )
        lines.append(row(cells))
    lines += notes(f"{_model(r)}: {r['note']}." for r in records.values() if "note" in r)
    lines += [
        "",
        "Shape classes: how many sets of row counts with equal bits each operation has, among the "
        "counts that were tried. Seconds: probes and whole-engine check, without starting engines.",
    ]
    return "\n".join(lines)


def certificate_summary(records: Records) -> str:
    """What each certificate allows, a line each."""
    lines = head("model", "dtype", "device", "allowed", "seconds")
    for record in records.values():
        device = _device(record)
        if device.startswith("cpu "):
            device = " ".join(device.split()[:3])  # without its features and caches
        seconds = f"{record['seconds']:.0f}"
        lines.append(row((_model(record), _dtype(record), device, _allowed(record), seconds)))
    return "\n".join(lines)


def _model(record: Record) -> str:
    """The model as the command names it; a certificate itself holds only a hash of its shape."""
    words = record["command"].split()
    name = str(words[words.index("certify") + 1])
    if "split_decode" in record["certificate"]["domain"]:
        name += ", split decode"
    used = runner(record)
    return name if used == DEFAULT_RUNNER else f"{name}, {used} runner"


def _dtype(record: Record) -> str:
    return str(record["certificate"]["domain"]["dtype"].removeprefix("torch."))


def _device(record: Record) -> str:
    return str(record["certificate"]["domain"]["device"])


def _allowed(record: Record) -> str:
    """The policies that are allowed, and of each what is withheld."""
    parts = []
    for policy in record["policies"]:
        if policy["allowed"]:
            withheld = policy["reason"].partition(_WITHHELD)[2]
            less = f" (without {withheld})" if withheld else ""
            parts.append(f"`{policy['policy']}`{less}")
    return ", ".join(parts) or "none"


def _classes(certificate: Record) -> str:
    """How many shape classes each operation has: those with one are counted, others named."""
    rows = certificate["rows"]
    by_number: dict[int, list[str]] = {}
    for claim in rows:
        by_number.setdefault(len(claim["classes"]), []).append(claim["name"])
    single = len(by_number.pop(1, []))
    parts = [f"1: {single} of {len(rows)} operations"] if single else []
    parts += [f"{number}: {', '.join(names)}" for number, names in sorted(by_number.items())]
    parts += [f"depends on place: {c['name']}" for c in rows if c["variant"]]
    return "; ".join(parts)


def _properties(certificate: Record) -> str:
    """How many step properties hold for each operation, and which do not."""
    parts = []
    for operation in dict.fromkeys(claim["operation"] for claim in certificate["steps"]):
        claims = [c for c in certificate["steps"] if c["operation"] == operation]
        broken = [c["name"] for c in claims if not c["holds"]]
        text = f"{operation}: {len(claims) - len(broken)} of {len(claims)}"
        parts.append(text + (f" (not {', '.join(broken)})" if broken else ""))
    return "; ".join(parts)


def _engine_check(certificate: Record) -> str:
    check = certificate["engine"]
    if not check:
        return NOT_CHECKED
    verdict = "equal" if check["equal"] else "differ"
    return f"{check['tokens']:,} tokens, {check['logprobs']:,} logprobs: {verdict}"
