"""Keeps vLLM's and torch's chatter out of CoRun's own commands; errors and CoRun's lines stay.

Everything goes through variables that vLLM and torch read for themselves, so that the engine's
processes, which inherit them, are as quiet as this one.
"""

import json
import logging.config
import os
import tempfile
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
# Any of them says that the user chose what vLLM logs.
CHOSEN_BY_USER = ("VLLM_LOGGING_LEVEL", CONFIG_VARIABLE, "VLLM_CONFIGURE_LOGGING")
LOG_FLAGS = ("--log-level", "--log-config", "--logging-config")
TORCH = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",  # torch's loggers: errors only
    "PYTHONWARNINGS": "ignore",
}


def _handler(text: str) -> dict[str, str]:
    return {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": text}


# Python's logging.config schema. vLLM's own loggers report errors; CoRun's report everything.
LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "vllm": {"format": "%(levelname)s [%(name)s:%(lineno)d, process %(process)d] %(message)s"},
        "corun": {"format": "%(message)s"},
    },
    "handlers": {"vllm": _handler("vllm"), "corun": _handler("corun")},
    "loggers": {
        "vllm": {"handlers": ["vllm"], "level": "ERROR", "propagate": False},
        "vllm.corun": {"handlers": ["corun"], "level": "INFO", "propagate": False},
    },
}


@contextmanager
def quiet(
    flags: Sequence[str] = (), environ: MutableMapping[str, str] | None = None
) -> Iterator[None]:
    """While it lasts, engines that are started log errors and CoRun's own lines only.

    Must be entered before vLLM and torch are imported. Does nothing where the user chose what vLLM
    logs, by variable or in `flags`. environ: default the process's own.
    """
    env = os.environ if environ is None else environ
    asked = any(flag.replace("_", "-").startswith(LOG_FLAGS) for flag in flags)
    if asked or any(name in env for name in CHOSEN_BY_USER):
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="corun-") as directory,
        warnings.catch_warnings(),
        _loggers_kept(),
    ):
        config = Path(directory, "logging.json")
        config.write_text(json.dumps(LOGGING))
        added = {CONFIG_VARIABLE: str(config)} | {k: v for k, v in TORCH.items() if k not in env}
        env.update(added)
        if env.get("PYTHONWARNINGS") == TORCH["PYTHONWARNINGS"]:
            warnings.simplefilter("ignore")
        logging.config.dictConfig(LOGGING)  # vLLM 0.32 does so only when an engine is configured
        try:
            yield
        finally:
            for name in added:
                env.pop(name, None)


@contextmanager
def _loggers_kept() -> Iterator[None]:
    """Afterwards vLLM's loggers in this process are as before."""
    loggers = [logging.getLogger(name) for name in LOGGING["loggers"]]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers
            logger.propagate = propagate
