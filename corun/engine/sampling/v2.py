"""Seam: sampling in vLLM's V2 runner (GPU).

``CoRunSampler`` takes the place of ``runner.sampler`` and shares all of its state. In a decode step
it works on all R rows that the LM head produced, with neutral rows below the active ones.
vLLM's own kernels still apply logit bias, allowed tokens, min_tokens, penalties and bad words, on
the active rows: each runs one program per row (or per row and block), reads the state of that row's
request only, and computes entry by entry. The three stages of the bias kernel run as separate
launches, since inside one of them different threads may write the same entry. (Thinking budgets are
refused at admission.)

Not vLLM's: temperature, min_p, top-k, top-p, the draw, and logprobs.
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from corun.engine.sampling.core import all_rows, processed_logits, sample_rows
from corun.engine.sampling.logprobs import OwnEntries, RowScores, score_table
from corun.engine.sampling.params import RowParams, top_k_of

_SAMPLE = "vllm.v1.worker.gpu.sample"
SEAMS: tuple[tuple, ...] = (
    (f"{_SAMPLE}.sampler", "Sampler.__call__", ("logits", "input_batch")),
    (f"{_SAMPLE}.sampler", "Sampler.add_request", ("req_idx", "sampling_params")),
    (f"{_SAMPLE}.states", "SamplingStates.max_num_logprobs", ("idx_mapping_np",)),
    (f"{_SAMPLE}.states", "NO_LOGPROBS"),
    (f"{_SAMPLE}.logprob", "LogprobTokenIdsState.max_num_token_ids", ("idx_mapping_np",)),
    (f"{_SAMPLE}.output", "SamplerOutput"),
    (f"{_SAMPLE}.logit_bias", "LogitBiasState"),
    (f"{_SAMPLE}.penalties", "PenaltiesState"),
    (f"{_SAMPLE}.bad_words", "BadWordsState"),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch.expanded_idx_mapping"),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch.expanded_local_pos"),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch.idx_mapping_np"),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch.logits_indices"),
    ("vllm.v1.worker.gpu.input_batch", "InputBatch.positions"),
    (
        "vllm.v1.worker.gpu.input_batch",
        "get_num_sampled_and_rejected",
        ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
    ),
    ("vllm.v1.worker.gpu.metrics.logits", "get_num_nans", ("logits",)),
)
SEAMS_BY_VERSION: dict[str, tuple[tuple, ...]] = {
    "0.25": (
        (f"{_SAMPLE}.logit_bias", "LogitBiasState.apply_logit_bias"),
        (f"{_SAMPLE}.penalties", "PenaltiesState.apply_penalties"),
        (f"{_SAMPLE}.bad_words", "BadWordsState.apply_bad_words"),
    ),
    "0.32": (
        (f"{_SAMPLE}.logits_processor.interface", "LogitsContext"),
        (f"{_SAMPLE}.logit_bias", "LogitBiasState.apply", ("logits", "ctx")),
        (f"{_SAMPLE}.penalties", "PenaltiesState.apply", ("logits", "ctx")),
        (f"{_SAMPLE}.bad_words", "BadWordsState.apply", ("logits", "ctx")),
    ),
}

# The counts that switch on the stages of vLLM's bias kernel, in its order.
_BIAS_STAGES = ("num_allowed_token_ids", "num_logit_bias", "num_stop_token_ids")
_BUILTIN = (LogitBiasState, PenaltiesState, BadWordsState)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one composition of the batch needs; rebuilt only when that changes.

    key: the slots of the active rows and the count of requests added so far, which tells a slot's
    new request from its last one.
    """

    key: tuple[bytes, int, int]
    params: RowParams
    processing: bool


class CoRunSampler(Sampler):
    """vLLM's V2 sampler with CoRun's draw: see the module."""

    _runner: Any
    _added: int
    _batch: _Batch | None
    _bias_stages: list[LogitBiasState]

    @classmethod
    def adopt(cls, sampler: Sampler, runner: Any) -> "CoRunSampler":
        """A CoRunSampler that shares every state object of vLLM's."""
        new = cls.__new__(cls)
        new.__dict__.update(sampler.__dict__)
        new._runner = runner
        new._added = 0
        new._batch = None
        new._bias_stages = _split_bias(_bias_state(sampler))
        return new

    def add_request(self, req_idx: int, *args: Any, **kwargs: Any) -> None:
        """vLLM's, and a note that the slot's parameters changed."""
        super().add_request(req_idx, *args, **kwargs)
        self._added += 1

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """Sample one token for each of the n active rows; logits: [n, V]."""
        active = logits.shape[0]
        num_nans = get_num_nans(logits) if self.compute_nans else None
        logits = all_rows(self._runner.corun, logits)
        batch = self._batch_of(input_batch.idx_mapping_np, logits)
        last = input_batch.positions[input_batch.logits_indices]
        positions = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        torch.add(last, 1, out=positions[:active])
        processed = logits
        if batch.processing:
            processed = logits.to(torch.float32, copy=True)
            self._process(processed[:active], input_batch, last)
        tokens, cut_logit, cut_entry = sample_rows(processed, batch.params, positions)
        table = None
        count = self.sampling_states.max_num_logprobs(input_batch.idx_mapping_np)
        own = self._own_entries(input_batch, logits.shape[0])
        if count != NO_LOGPROBS or own is not None:
            source = logits
            if self.logprobs_mode.startswith("processed"):
                source = processed_logits(processed, batch.params, cut_logit, cut_entry)
            scores = RowScores(source, tokens, as_logits=self.logprobs_mode.endswith("logits"))
            entries, values = score_table(scores, tokens, max(count, 0), own)
            table = LogprobsTensors(entries[:active], values[:active], scores.rank[:active])
        # One token per request, none for a prompt chunk that is not the last (vLLM's rule).
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens[:active, None],
            logprobs_tensors=table,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _batch_of(self, slots: np.ndarray, logits: torch.Tensor) -> _Batch:
        """The batch of these request slots at the rows of `logits` [N, V]."""
        rows, vocab = logits.shape
        key = (slots.tobytes(), self._added, rows)
        if self._batch is None or self._batch.key != key:
            states = self.sampling_states
            self._batch = _Batch(
                key=key,
                params=RowParams.build(
                    rows,
                    vocab,
                    logits.device,
                    temperature=states.temperature.np[slots],
                    top_k=top_k_of(states.top_k.np[slots], states.vocab_size, vocab),
                    top_p=states.top_p.np[slots],
                    min_p=states.min_p.np[slots],
                    seeds=states.seeds.np[slots],
                ),
                processing=self._asks_processing(slots),
            )
        return self._batch

    def _asks_processing(self, slots: np.ndarray) -> bool:
        """Whether any row asks vLLM's processors for anything."""
        return bool(
            self._bias_stages[0].use_logit_bias[slots].any()
            or self.penalties_state.use_penalty[slots].any()
            or _bad_words_state(self).num_bad_words.np[slots].any()
        )

    def _process(self, rows: torch.Tensor, input_batch: Any, last: torch.Tensor) -> None:
        """Apply vLLM's entry-wise processors in place. rows: [n, V] fp32; last: [n] positions."""
        mapping, slots = input_batch.expanded_idx_mapping, input_batch.idx_mapping_np
        local = input_batch.expanded_local_pos
        input_ids = input_batch.input_ids[input_batch.logits_indices]
        bad_words = _bad_words_state(self)
        if hasattr(bad_words, "apply_bad_words"):  # 0.25
            for stage in self._bias_stages:
                stage.apply_logit_bias(rows, mapping, slots, last)
            self.penalties_state.apply_penalties(rows, mapping, slots, input_ids, local)
            bad_words.apply_bad_words(rows, mapping, slots, input_ids, local)
            return
        from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

        context = LogitsContext(
            expanded_idx_mapping=mapping,
            idx_mapping=input_batch.idx_mapping,
            idx_mapping_np=slots,
            expanded_local_pos=local,
            input_ids=input_ids,
            pos=last,
            seq_lens_upper_bound_np=input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        for processor in (*self._bias_stages, self.penalties_state, bad_words):
            done = processor.apply(rows, context)
            assert done.data_ptr() == rows.data_ptr(), "a logits processor did not work in place"

    def _own_entries(self, input_batch: Any, rows: int) -> OwnEntries | None:
        """The entries that rows named through ``logprob_token_ids``."""
        slots = input_batch.idx_mapping_np
        state = self.logprob_token_ids_state
        width = state.max_num_token_ids(slots)
        if width == 0:
            return None
        active = len(slots)
        on_device = input_batch.idx_mapping[:active].long()
        entries = torch.zeros((rows, width), dtype=torch.int64, device=on_device.device)
        counts = torch.zeros(rows, dtype=torch.int64, device=on_device.device)
        counts[:active] = state.num_token_ids.gpu[on_device]
        entries[:active] = state.token_ids.gpu[on_device, :width]
        outside = torch.arange(width, device=counts.device)[None, :] >= counts[:, None]
        return OwnEntries(entries.masked_fill_(outside, 0), counts)


def _bias_state(sampler: Sampler) -> LogitBiasState:
    if hasattr(sampler, "logit_bias_state"):  # 0.25
        return sampler.logit_bias_state
    return next(p for p in sampler.logits_processors if isinstance(p, LogitBiasState))


def _bad_words_state(sampler: Sampler) -> BadWordsState:
    if hasattr(sampler, "bad_words_state"):  # 0.25
        return sampler.bad_words_state
    return next(p for p in sampler.logits_processors if isinstance(p, BadWordsState))


def _split_bias(state: LogitBiasState) -> list[LogitBiasState]:
    """Views of `state` with one stage of its kernel each: the others' counts read zero."""
    nothing = SimpleNamespace(gpu=torch.zeros_like(state.num_logit_bias.gpu))
    stages = []
    for stage in _BIAS_STAGES:
        view = copy.copy(state)
        for other in _BIAS_STAGES:
            if other != stage:
                setattr(view, other, nothing)
        stages.append(view)
    return stages


def install(runner: Any) -> None:
    """Put CoRun's sampler into a V2 runner that holds a RunnerState as ``runner.corun``.

    Does nothing on pipeline ranks that do not sample. ValueError where the engine samples in a way
    that CoRun does not know.
    """
    sampler = runner.sampler
    if sampler is None:
        return
    unknown = []
    if type(sampler) is not Sampler:
        unknown.append(f"the sampler {type(sampler).__name__}")
    unknown += [
        f"the logits processor {type(p).__name__}"
        for p in getattr(sampler, "logits_processors", ())
        if type(p) not in _BUILTIN
    ]
    if getattr(sampler, "trace_replay_state", None) is not None:
        unknown.append("trace replay")
    if getattr(sampler, "return_sampling_mask", False):
        unknown.append("sampling masks in outputs")
    if getattr(runner, "batch_sharder", None) is not None:
        unknown.append("batch-sharded sampling")
    if unknown:
        raise ValueError(
            f"CoRun cannot vouch for {', '.join(unknown)}: what one request gets may depend on "
            "others. Start the engine without it, or with policy 'off'"
        )
    runner.sampler = CoRunSampler.adopt(sampler, runner)
