"""corun.LLM: vLLM's offline ``LLM`` with CoRun on."""

import os
from typing import Any

import vllm

from corun.config import CoRunConfig
from corun.contract import fingerprint
from corun.engine.plugins import ensure_plugin
from corun.plugin import register


class LLM(vllm.LLM):
    """``vllm.LLM`` under a CoRun policy.

    model: as in vLLM. corun: a CoRunConfig, or a policy's name (default "auto"). Every other
    keyword goes to vLLM. ValueError names a setting that would break the contract, before anything
    starts.
    """

    def __init__(self, model: str, *, corun: CoRunConfig | str = "auto", **kwargs: Any) -> None:
        config = CoRunConfig(policy=corun) if isinstance(corun, str) else corun
        register()
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0":
            ensure_plugin(os.environ)  # the engine core is a process of its own
        additional = {**(kwargs.pop("additional_config", None) or {}), "corun": config.to_mapping()}
        super().__init__(model, additional_config=additional, **kwargs)

    def corun_report(self) -> dict[str, Any]:
        """Worker 0's report: the plan, executed steps, violations, and the domain."""
        return self.collective_rpc("corun_report")[0]

    @property
    def domain(self) -> str:
        """The domain's fingerprint: outputs are comparable to the bit where it is equal."""
        return fingerprint(self.corun_report()["domain"])
