"""CoRun: the same tokens and logprobs, to the bit, whatever else runs beside a request."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from corun.config import CoRunConfig

if TYPE_CHECKING:
    from corun.engine.llm import LLM

try:
    __version__ = version("corun-vllm")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.0.0+source"

__all__ = ["LLM", "CoRunConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # importing it imports vLLM
        from corun.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'corun' has no attribute {name!r}")
