"""Puts the front-end seams in place; the worker's are attached when the worker starts."""

from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCore

from corun.config import CoRunConfig
from corun.engine import admission, arguments, http, random_weights, seeds
from corun.engine.wrap_once import wrap_once

SEAMS = (("vllm.v1.engine.core", "EngineCore.__init__", ("vllm_config",)),)


def _guarded(start: Callable) -> Callable:
    """An engine that bypassed EngineArgs although CORUN_POLICY asks for CoRun must not start."""

    def guarded(self: EngineCore, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        asked = CoRunConfig.from_env()
        given = (vllm_config.additional_config or {}).get("corun")
        if asked and asked.enabled and given is None:
            raise RuntimeError(
                f"CORUN_POLICY={asked.policy} is set, but this engine's config was not built "
                "through vLLM's EngineArgs, so CoRun does not hold it. Build it with "
                "EngineArgs(...).create_engine_config(), or unset CORUN_POLICY"
            )
        start(self, vllm_config, *args, **kwargs)

    return guarded


def install() -> None:
    """Install every front-end seam; once, however often it is called."""
    arguments.install()
    admission.install()
    seeds.install()
    http.install_http()
    random_weights.install()
    wrap_once(EngineCore, "__init__", _guarded)
