"""Whether a command's MODEL can be one: told at once, before vLLM is imported, which takes long.

What looks like a path (it begins with ".", "/" or "~", exists, or has more than one slash) must be
a model's directory; anything else is a name on the Hugging Face Hub.
"""

import os
from collections.abc import Mapping
from pathlib import Path

CONFIG_FILES = ("config.json", "params.json")  # Hugging Face's form, and Mistral's
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
WANTED = "MODEL is a directory with a config.json, or a Hub name such as Qwen/Qwen3-8B"


def check_model(name: str, environ: Mapping[str, str] | None = None) -> None:
    """ValueError with one line where `name` cannot be a model.

    environ: where to look for Hugging Face's offline settings; default the process's own.
    """
    env = os.environ if environ is None else environ
    if "://" in name:  # object storage, which only vLLM can ask
        return
    if _looks_like_path(name):
        _check_path(name)
        return
    offline = next((v for v in OFFLINE_VARIABLES if _true(env.get(v))), None)
    if offline and not _true(env.get("VLLM_USE_MODELSCOPE")):
        _check_cached(name, offline)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.lexists(name)


def _check_path(name: str) -> None:
    path = Path(name)
    if not path.exists():
        raise ValueError(f"there is no {name}; {WANTED}")
    if path.is_file():
        if path.suffix != ".gguf":  # vLLM reads such a file by itself
            raise ValueError(f"{name} is a file; {WANTED}")
    elif not any((path / file).is_file() for file in CONFIG_FILES):
        raise ValueError(f"the directory {name} holds no config.json, so it is no model; {WANTED}")


def _check_cached(name: str, offline: str) -> None:
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
    except ImportError:  # it comes with vLLM, whose absence is told elsewhere
        return
    # "owner/name:what" asks for one file of a repository.
    folder = repo_folder_name(repo_id=name.partition(":")[0], repo_type="model")
    snapshots = Path(constants.HF_HUB_CACHE, folder, "snapshots")
    if not any(snapshots.glob("*/*")):
        raise ValueError(
            f"{name} is neither a directory here nor in the Hugging Face cache "
            f"({constants.HF_HUB_CACHE}), and {offline} forbids a download; unset it, or give a "
            "model's directory"
        )


def _true(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "true", "yes", "on")
