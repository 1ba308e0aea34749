"""Which plan an engine would run under, and by which certificate; no engine is started."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from corun.certify import store
from corun.config import CoRunConfig
from corun.engine import split_switch
from corun.engine.arguments import GPU_TOKENS, settle
from corun.engine.compilation import tokens_compiled_for
from corun.engine.domain import device_name, software
from corun.engine.subject import subject
from corun.plan import Plan


def explain(model: str, config: CoRunConfig, engine_args: Mapping[str, Any]) -> tuple[Plan, Path]:
    """The plan for `model` under `config` (never ``off``), and where its certificate belongs.

    engine_args: vLLM's, by keyword. ValueError says why there is no plan.
    """
    args = EngineArgs(model=model, **engine_args)
    with _environment_kept():
        config = split_switch.settle(config, args, args.create_model_config())
        plan = settle(args, config).plan
        if config.certificate is not None:
            return plan, Path(config.certificate)
        if plan.constrained:  # as settled; else the scheduler's budget is in its place
            assert args.max_num_batched_tokens is not None
            compiled_for = args.max_num_batched_tokens
        else:
            compiled_for = tokens_compiled_for(args, plan.max_prefill_tokens, GPU_TOKENS)
        model_config = args.create_model_config()
        return plan, store.path_of(
            subject(args, model_config, compiled_for, split=config.split_decode)
        )


def here() -> dict[str, Any]:
    """What a certificate of this machine says about it, whatever the model."""
    return {"device": device_name(), "software": software()}


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Settling pins variables for an engine that is about to start; here none is."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
