"""vLLM's entry to CoRun (``vllm.general_plugins``). Imports no vLLM until vLLM calls it.

vLLM logs a plugin that fails to *import* and goes on without it, which would be silent
nondeterminism; so nothing here can fail at import, and ``register`` itself may raise.
"""


def register() -> None:
    """Put CoRun's seams in place. Idempotent, and inert until a CoRun policy is asked for."""
    from corun.engine import install

    install.install()
