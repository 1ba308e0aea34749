"""Seam: sampling in vLLM's V1 runner, on GPU and CPU.

``CoRunSampler`` takes the place of ``runner.sampler``. In a decode step it works on all R rows that
the LM head produced, with neutral rows below the active ones, and hands the n active rows back.
vLLM's own code still applies what it applies entry by entry, exactly, on the active rows:

- grammar masks, bad words, min_tokens: they write fixed values at chosen entries;
- logit bias: one addition at chosen entries;
- penalties: a product and two subtractions per entry, with operands from that row alone; a row that
  asked for none gets its logits times 1 minus 0, the same bits.

Not vLLM's: min_p (a softmax over as many rows as are active), top-k, top-p, the draw, logprobs, and
the mask of allowed tokens (0.25.0 leaves one in the slot that a request moved out of, for the next
request that gets the slot).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from corun.engine.sampling.core import all_rows, processed_logits, sample_rows
from corun.engine.sampling.logprobs import OwnEntries, RowScores, score_table
from corun.engine.sampling.params import RowParams, to_device, top_k_of

_RUNNER = "vllm.v1.worker.gpu_model_runner"
_BATCH = "vllm.v1.worker.gpu_input_batch"
_METADATA = "vllm.v1.sample.metadata"
_BUILTIN = "vllm.v1.sample.logits_processor.builtin"
SEAMS: tuple[tuple, ...] = (
    (
        "vllm.v1.sample.sampler",
        "Sampler.forward",
        ("logits", "sampling_metadata", "predict_bonus_token", "logprobs_mode_override"),
    ),
    (
        "vllm.v1.sample.sampler",
        "Sampler.apply_logits_processors",
        ("logits", "sampling_metadata", "predict_bonus_token"),
    ),
    ("vllm.v1.sample.sampler", "Sampler.compute_logprobs", ("logits",)),
    (
        "vllm.v1.sample.sampler",
        "Sampler.gather_logprobs",
        ("logprobs", "num_logprobs", "token_ids"),
    ),
    ("vllm.v1.outputs", "LogprobsTensors"),
    ("vllm.v1.outputs", "SamplerOutput"),
    (_RUNNER, "GPUModelRunner._sample", ("logits", "spec_decode_metadata")),
    (_BATCH, "InputBatch.refresh_metadata"),
    (_BATCH, "InputBatch.req_ids"),
    (_METADATA, "SamplingMetadata.max_num_logprobs"),
    (_METADATA, "SamplingMetadata.logprob_token_ids"),
    (_METADATA, "SamplingMetadata.allowed_token_ids_mask"),
    (_METADATA, "SamplingMetadata.bad_words_token_ids"),
    (_METADATA, "SamplingMetadata.no_penalties"),
    (_METADATA, "SamplingMetadata.logitsprocs"),
    ("vllm.v1.sample.logits_processor", "BUILTIN_LOGITS_PROCESSORS"),
    (_BUILTIN, "MinPLogitsProcessor"),
    (_BUILTIN, "MinTokensLogitsProcessor"),
    (_BUILTIN, "LogitBiasLogitsProcessor"),
)


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one composition of the batch needs; rebuilt only when that changes.

    given: vLLM's metadata that this was built from. metadata: the same with CoRun's mask of allowed
    tokens. rows: rows that sampling runs at. own: rows that named the entries to score.
    """

    given: SamplingMetadata
    metadata: SamplingMetadata
    rows: int
    params: RowParams
    own: OwnEntries | None


class CoRunSampler(Sampler):
    """vLLM's V1 sampler with CoRun's draw: see the module."""

    def __init__(self, runner: Any, replaced: Sampler) -> None:
        torch.nn.Module.__init__(self)
        self.logprobs_mode = replaced.logprobs_mode
        self._runner = runner
        self._batch: _Batch | None = None

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        """Sample one token for each of the n active rows; logits: [n, V]."""
        if sampling_metadata is not self._runner.input_batch.sampling_metadata:
            raise RuntimeError(
                "CoRun: vLLM asked for samples outside of a batch, where there are no seeds"
            )
        active = logits.shape[0]
        logits = all_rows(self._runner.corun, logits)
        batch = self._batch_of(sampling_metadata, logits.shape[0], logits.shape[1])
        mode = logprobs_mode_override or self.logprobs_mode
        processed = self._processed(logits, active, batch.metadata, predict_bonus_token)
        tokens, cut_logit, cut_entry = sample_rows(
            processed, batch.params, self._positions(active, batch.rows)
        )
        count = sampling_metadata.max_num_logprobs
        table = None
        if count is not None or batch.own is not None:
            source = logits
            if mode.startswith("processed"):
                source = processed_logits(processed, batch.params, cut_logit, cut_entry)
            scores = RowScores(source, tokens, as_logits=mode.endswith("logits"))
            table = _table(scores, tokens, count or 0, batch.own, active)
        return SamplerOutput(
            sampled_token_ids=tokens[:active].to(torch.int32)[:, None], logprobs_tensors=table
        )

    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        """Log-softmax in fp32 of [N, V]; vLLM calls it for prompt logprobs."""
        first = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        return RowScores(logits, first).full()

    @staticmethod
    def gather_logprobs(
        logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """The table of given scores [N, V] for given tokens [N] (prompt logprobs)."""
        scores = RowScores(logprobs, token_ids, as_logits=True)
        return _table(scores, token_ids, num_logprobs, None, logprobs.shape[0])

    def _positions(self, active: int, rows: int) -> torch.Tensor:
        """[rows] int64: for each active row, the index in its sequence of the token being drawn.

        That is one past the last token that the row brought into this step. Its position is on the
        device, right under synchronous and asynchronous scheduling alike, while the host may not
        know the tokens before it yet. A prompt chunk that is not the last is drawn from too; vLLM
        discards that token, and nothing was used up by it.
        """
        runner = self._runner
        if runner.corun.decode_step:
            last = runner.positions[:active]  # each request brought one token
        else:
            last = runner.positions[runner.query_start_loc.gpu[1 : active + 1].long() - 1]
        positions = torch.zeros(rows, dtype=torch.int64, device=last.device)
        torch.add(last, 1, out=positions[:active])
        return positions

    def _batch_of(self, given: SamplingMetadata, rows: int, vocab: int) -> _Batch:
        """The batch of this metadata at this many rows; vLLM replaces the object on any change."""
        if self._batch is None or self._batch.given is not given or self._batch.rows != rows:
            batch, device = self._runner.input_batch, self._runner.device
            n = batch.num_reqs
            self._batch = _Batch(
                given=given,
                metadata=replace(
                    given,
                    allowed_token_ids_mask=self._allowed_mask(given, vocab),
                    logprob_token_ids=None,
                ),
                rows=rows,
                params=RowParams.build(
                    rows,
                    vocab,
                    device,
                    temperature=batch.temperature_cpu[:n],
                    top_k=top_k_of(batch.top_k_cpu[:n], batch.vocab_size, vocab),
                    top_p=batch.top_p_cpu[:n],
                    min_p=_min_p(given)[:n],
                    seeds=self._seeds(batch.req_ids[:n]),
                ),
                own=_own_entries(given, rows, device),
            )
        return self._batch

    def _seeds(self, request_ids: list[str]) -> np.ndarray:
        seeds = self._runner.corun.seeds
        try:
            return np.array([seeds[r] for r in request_ids], dtype=np.int64)
        except KeyError as e:
            raise RuntimeError(f"CoRun: request {e} reached the sampler without a seed") from None

    def _allowed_mask(self, given: SamplingMetadata, vocab: int) -> torch.Tensor | None:
        """[n, V] bool, True where a token is forbidden, from the requests' own parameters."""
        if given.allowed_token_ids_mask is None:
            return None
        batch = self._runner.input_batch
        mask = np.zeros((batch.num_reqs, vocab), dtype=bool)
        for row, request_id in enumerate(batch.req_ids):
            allowed = self._runner.requests[request_id].sampling_params.allowed_token_ids
            if allowed:
                mask[row] = True
                mask[row, allowed] = False
        return to_device(mask, self._runner.device)

    def _processed(
        self,
        logits: torch.Tensor,
        active: int,
        metadata: SamplingMetadata,
        predict_bonus_token: bool,
    ) -> torch.Tensor:
        """The rows after vLLM's entry-wise processors, in a copy; as given where none asked."""
        if not _asks_processing(metadata):
            return logits
        rows = logits.to(torch.float32, copy=True)
        done = self.apply_logits_processors(rows[:active], metadata, predict_bonus_token)
        assert done.data_ptr() == rows.data_ptr(), "a logits processor did not work in place"
        return rows


def _table(
    scores: RowScores, tokens: torch.Tensor, count: int, own: OwnEntries | None, active: int
) -> LogprobsTensors:
    """vLLM's logprobs of the active rows; count -1: every score, unsorted."""
    if count < 0:
        return LogprobsTensors(torch.empty(0), scores.full()[:active], torch.empty(0))
    entries, values = score_table(scores, tokens, count, own)
    return LogprobsTensors(entries[:active].to(torch.int32), values[:active], scores.rank[:active])


def _min_p(metadata: SamplingMetadata) -> np.ndarray:
    """min_p by row, from vLLM's processor, which is never applied."""
    for processor in metadata.logitsprocs.argmax_invariant:
        if isinstance(processor, MinPLogitsProcessor):
            return processor.min_p_cpu
    raise RuntimeError("CoRun: vLLM loaded no min_p processor, so requests' min_p cannot be read")


def _own_entries(metadata: SamplingMetadata, rows: int, device: torch.device) -> OwnEntries | None:
    """The entries that rows named through ``logprob_token_ids``."""
    named = metadata.logprob_token_ids
    if not named:
        return None
    entries = np.zeros((rows, max(map(len, named.values()))), dtype=np.int64)
    counts = np.zeros(rows, dtype=np.int64)
    for row, tokens in named.items():
        entries[row, : len(tokens)], counts[row] = tokens, len(tokens)
    return OwnEntries(to_device(entries, device), to_device(counts, device))


def _asks_processing(metadata: SamplingMetadata) -> bool:
    """Whether any row asks vLLM's processors for anything."""
    if (
        metadata.allowed_token_ids_mask is not None
        or metadata.bad_words_token_ids
        or not metadata.no_penalties
    ):
        return True
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor) and not processor.min_toks:
            continue
        if isinstance(processor, LogitBiasLogitsProcessor) and not processor.biases:
            continue
        return True
    return False


def install(runner: Any) -> None:
    """Put CoRun's sampler into a V1 runner that holds a RunnerState as ``runner.corun``.

    ValueError where the engine loaded logits processors that CoRun does not know.
    """
    foreign = [
        type(p).__name__
        for p in runner.input_batch.logitsprocs.all
        if type(p) not in BUILTIN_LOGITS_PROCESSORS
    ]
    if foreign:
        raise ValueError(
            f"CoRun cannot vouch for the logits processor(s) {', '.join(foreign)}: what they do to "
            "one request may depend on others. Start the engine without them, or with policy 'off'"
        )
    runner.sampler = CoRunSampler(runner, runner.sampler)
