"""Which plan runs: what was asked for, and what this machine's certificate allows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from corun.certify import planner, store
from corun.certify.certificate import Certificate, CertificateError
from corun.config import MEASURE, CoRunConfig
from corun.engine.split_schedule import SPLIT_BEYOND
from corun.engine.subject import subject
from corun.plan import Grants, Plan
from corun.rows import Rows

HOW = "make one with 'corun certify MODEL' and the same engine arguments"
HOW_SPLIT = f"{HOW}, and --split-decode"


def without_model(policy: str) -> tuple[str, str]:
    """The policy that runs for `policy` as far as can be told without a model, and why.

    ValueError where it cannot run for any model here.
    """
    kept = store.count()
    if policy == "auto":
        return "isolate", f"or what a model's own certificate allows ({kept} kept here)"
    if policy in ("pack", "certified"):
        if not kept:
            raise ValueError(
                f"the policy {policy!r} needs a certificate, and none is kept here; {HOW}"
            )
        return policy, f"for models whose certificate allows it ({kept} kept here)"
    return policy, "you asked for it"


def _unheld(args: EngineArgs) -> str | None:
    """Why only ``isolate`` can run this engine, whatever was measured; None if it is not so.

    The compiler may make kernels for some step sizes apart; a certificate needs one set.
    """
    if args.enforce_eager:
        return None
    for name in ("compile_sizes", "compile_ranges_endpoints"):
        if sizes := getattr(args.compilation_config, name):
            return f"compilation_config.{name}={sizes} gives some step sizes kernels of their own"
    return None


def find(
    config: CoRunConfig, args: EngineArgs, model_config: Any, compiled_for: int
) -> Certificate | None:
    """The certificate that was named, or this machine's own; None where there is none.

    model_config, compiled_for: see ``subject``. CertificateError where it is of no use here.
    """
    wanted = subject(args, model_config, compiled_for, split=config.split_decode)
    if config.certificate is None:
        return store.load(wanted)
    try:
        given = json.loads(Path(config.certificate).read_text())
    except (OSError, ValueError) as e:
        raise CertificateError(f"the certificate {config.certificate} cannot be read: {e}") from e
    certificate = Certificate.from_mapping(given)
    store.check_subject(certificate, wanted, config.certificate)
    return certificate


def choose(
    config: CoRunConfig,
    args: EngineArgs,
    model_config: Any,
    rows: int,
    tokens: int,
    *,
    compiled_for: int,
) -> Plan:
    """The plan for `config` (never ``off``). ValueError says why there is none.

    model_config, compiled_for: see ``subject``. rows: ``max_num_seqs``. tokens: the longest step
    asked for. ``decode_graph`` is not settled yet.
    """
    if config.certificate == MEASURE:
        if why := _unheld(args):
            raise ValueError(f"{why}; remove that setting to certify the engine")
        return Plan(
            "certified",
            rows,
            tokens,
            False,
            "nothing is proven yet: this engine is being measured",
            grants=Grants.everything(),
            step_rows=Rows.span(1, tokens),
            sample_rows=Rows.span(1, rows),
            split_beyond=SPLIT_BEYOND if config.split_decode else 0,
        )
    engine = planner.Engine(rows, tokens, False, model_config.max_model_len)
    unheld, how = _unheld(args), HOW_SPLIT if config.split_decode else HOW
    certificate = None if unheld else find(config, args, model_config, compiled_for)
    if certificate is not None:
        plan = planner.plan(certificate, engine, config.policy)
        return plan if plan.certificate is None else replace(plan, worker=certificate.worker)
    if unheld and config.policy != "isolate":
        if config.policy != "auto":
            raise ValueError(f"{unheld}; use 'isolate' or 'auto'")
        return Plan("isolate", rows, tokens, False, unheld)
    if config.policy in ("pack", "certified"):
        raise ValueError(
            f"the policy {config.policy!r} needs a certificate of this machine's shape classes, "
            f"and there is none for this engine; {how}, or use 'isolate' or 'auto'"
        )
    if config.policy == "auto":
        reason = f"no certificate says that more shapes are safe; {how}"
    else:
        reason = "you asked for it"
    return Plan("isolate", rows, tokens, False, reason)
