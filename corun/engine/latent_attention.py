"""Seam: the prefill of latent attention (MLA), where a step may hold more than one prompt.

vLLM computes long pieces of prompts by another algorithm than decode rows, in a prefill backend
of its own. CoRun holds that to one KV split. What a prompt has in the cache already is read in
parts, whose length vLLM takes from the number of such prompts in the step; CoRun's planner sees to
it that there is one at most, or that none has any (``corun.certify.planner``); this seam checks.
"""

from typing import Any

from corun.engine.runner_state import RunnerState

SEAMS: tuple[tuple, ...] = (
    ("vllm.v1.attention.backends.mla.prefill.base", "MLAPrefillBackend.get_name"),
    (
        "vllm.model_executor.layers.attention.mla_attention",
        "MLACommonPrefillMetadata.ChunkedContextMetadata",
    ),
)
PREFILL_BACKEND = "FLASH_ATTN"


def hold_prefill(builder: Any, state: RunnerState) -> None:
    """One KV split in `builder`'s prefill backend, and a check of what it builds.

    ValueError where the backend is another one.
    """
    if state.plan.policy == "isolate":
        return  # a prefill holds one request: its splits depend on nothing else
    backend = builder._prefill_backend
    if (name := backend.get_name()) != PREFILL_BACKEND:
        raise ValueError(
            f"CoRun does not hold the MLA prefill backend {name} under the policy "
            f"{state.plan.policy!r}; set attention_config.mla_prefill_backend to "
            f"{PREFILL_BACKEND}, or use 'isolate'"
        )
    kernel = backend.flash_attn_varlen_func

    def one_split(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **{**kwargs, "num_splits": 1})

    backend.flash_attn_varlen_func = one_split
    build = builder.build

    def checked(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        _check_context(metadata, state)
        return metadata

    builder.build = checked


def _check_context(metadata: Any, state: RunnerState) -> None:
    """RuntimeError where several prompts' cached context is read in parts in this step."""
    prefill = metadata.prefill
    context = None if prefill is None else prefill.chunked_context
    if context is None or state.plan.certificate is None:
        return
    if hasattr(context, "chunks"):  # 0.32
        parts, prompts = len(context.chunks), sum(n > 0 for n in context.context_lens_list)
    else:
        parts, prompts = len(context.seq_tot), int((context.seq_lens[0] > 0).sum())
    if parts > 1 and prompts > 1:
        raise RuntimeError(
            f"CoRun: vLLM reads the cached context of {prompts} prompts in parts that depend on "
            "their number; the plan should have kept them apart"
        )
