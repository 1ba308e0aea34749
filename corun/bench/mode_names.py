"""Modes as people read them, and the order of modes and workloads in tables and figures."""

from collections.abc import Collection

PLAIN = "std"
LABELS = {
    PLAIN: "plain vLLM",
    "bi": "batch-invariant",
    "nosplit": "+ no decode split-KV",
    "nosplit+prefill": "+ isolated prefill",
    "isolate": "CoRun isolate",
    "pack": "CoRun pack",
    "certified": "CoRun certified",
    "certified+split": "CoRun certified, split decode",
    "auto": "CoRun auto",
}
ABLATION = (PLAIN, "nosplit", "nosplit+prefill", "isolate")
"""The paper's ablation: each mode adds one constraint to the one before."""


def split(mode: str) -> tuple[str, str]:
    """A mode's name and its runner: ("std", "v1") of "std@v1", ("std", "") of "std"."""
    name, _, runner = mode.partition("@")
    return name, runner


def label(mode: str) -> str:
    """What figures and tables call a mode; an unknown one keeps its own name."""
    name, runner = split(mode)
    text = LABELS.get(name, name)
    return f"{text} ({runner.upper()})" if runner else text


def order(mode: str) -> tuple[int, str, str]:
    """A sort key: plain vLLM first, then as in LABELS, unknown modes last."""
    name, runner = split(mode)
    known = list(LABELS)
    return (known.index(name) if name in known else len(known), name, runner)


def workload_order(workload: str) -> tuple[bool, int, int, str]:
    """A sort key: named workloads first, then IN/OUT by their outputs, as the paper has them."""
    n_in, _, n_out = workload.partition("/")
    if n_in.isdecimal() and n_out.isdecimal():
        return True, int(n_out), int(n_in), workload
    return False, 0, 0, workload


def plain_of(mode: str, modes: Collection[str]) -> str | None:
    """The one of `modes` that `mode` is measured against: plain vLLM, on its runner if it ran so.

    None where plain vLLM is not among them.
    """
    runner = split(mode)[1]
    for plain in (f"{PLAIN}@{runner}" if runner else PLAIN, PLAIN):
        if plain in modes:
            return plain
    return None
