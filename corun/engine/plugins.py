"""Whether vLLM's processes load CoRun's plugin. vLLM finds it by the installed package's metadata.

The engine core and the workers are processes of their own, and each must find it.
"""

from collections.abc import Mapping, MutableMapping
from importlib.metadata import entry_points

PLUGIN_GROUP = "vllm.general_plugins"


def plugin_installed() -> bool:
    """Whether vLLM finds the plugin, that is, whether the package is installed."""
    return any(e.value.startswith("corun.") for e in entry_points(group=PLUGIN_GROUP))


def plugin_blocked(environ: Mapping[str, str]) -> bool:
    """Whether VLLM_PLUGINS keeps vLLM from loading the plugin."""
    allowed = environ.get("VLLM_PLUGINS")
    return allowed is not None and "corun" not in allowed.split(",")


def ensure_plugin(environ: MutableMapping[str, str]) -> None:
    """Add the plugin to VLLM_PLUGINS where that leaves it out. ValueError: it is not installed."""
    if not plugin_installed():
        raise ValueError(
            "vLLM's processes would not find CoRun's plugin: install the package 'corun-vllm' "
            "(from its source tree: pip install -e .)"
        )
    if plugin_blocked(environ):
        environ["VLLM_PLUGINS"] = ",".join(p for p in (environ["VLLM_PLUGINS"], "corun") if p)
