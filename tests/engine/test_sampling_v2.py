"""The V2 runner's sampler, on the CPU: its states are stand-ins, the draw and the tables are real.

vLLM's V2 kernels need a GPU; benchmarks/gpu_sampling_check.py and 'corun verify' cover them there.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from corun.engine.runner_state import RunnerState
from corun.engine.sampling import v2
from corun.engine.sampling.core import sample_rows
from corun.engine.sampling.logprobs import RowScores
from corun.engine.sampling.params import RowParams
from corun.plan import Plan

ROWS, SLOTS, VOCAB = 8, 12, 203
CPU = torch.device("cpu")
PLAN = Plan("isolate", ROWS, 512, False, "test")


class Backed:
    """vLLM's UvaBackedTensor: the host's values and the device's copy."""

    def __init__(self, values, dtype):
        self.np = np.array(values, dtype=dtype)
        self.gpu = torch.from_numpy(self.np)


def bare(cls, **attributes):
    made = cls.__new__(cls)
    made.__dict__.update(attributes)
    return made


class Bias(LogitBiasState):
    """Applies, like vLLM's kernel, whichever stages have a count above zero."""

    def apply(self, logits, ctx):
        slots = ctx.idx_mapping_np
        for row, slot in enumerate(slots):
            if int(self.num_allowed_token_ids.gpu[slot]):
                kept = logits[row, 7].clone()
                logits[row] = -torch.inf
                logits[row, 7] = kept
            if int(self.num_logit_bias.gpu[slot]):
                logits[row, 9] += 50.0
            if int(self.num_stop_token_ids.gpu[slot]):
                logits[row, 9] = -torch.inf
        return logits

    def apply_logit_bias(self, logits, mapping, slots, pos):
        self.calls.append([int(c.gpu.sum()) for c in (self.num_allowed_token_ids,
                           self.num_logit_bias, self.num_stop_token_ids)])  # fmt: skip
        self.apply(logits, SimpleNamespace(idx_mapping_np=slots))


class Penalties(PenaltiesState):
    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.idx_mapping_np):
            if self.use_penalty[slot]:
                logits[row] *= 0.5
        return logits

    def apply_penalties(self, logits, mapping, slots, input_ids, local):
        self.apply(logits, SimpleNamespace(idx_mapping_np=slots))


class BadWords25(BadWordsState):
    def apply_bad_words(self, logits, mapping, slots, input_ids, local):
        for row, slot in enumerate(slots):
            if self.num_bad_words.np[slot]:
                logits[row, 3] = -torch.inf


class BadWords32(BadWordsState):
    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.idx_mapping_np):
            if self.num_bad_words.np[slot]:
                logits[row, 3] = -torch.inf
        return logits


def has_v32():
    return hasattr(LogitBiasState, "apply")


@pytest.fixture(
    params=[
        "0.25",
        pytest.param("0.32", marks=pytest.mark.skipif(not has_v32(), reason="vLLM 0.25")),
    ]
)
def sampler(request, monkeypatch):
    """A V2 sampler of either version's layout, adopted by CoRun, in a decode step."""
    states = SimpleNamespace(
        vocab_size=VOCAB,
        temperature=Backed([0, 1, 0.7, 1, 1, 1, 1, 1, 1, 1, 1, 2], np.float32),
        top_k=Backed([VOCAB, VOCAB, 20, VOCAB, VOCAB, 5] + [VOCAB] * 6, np.int32),
        top_p=Backed([1, 1, 1, 0.8, 1, 0.9] + [1] * 6, np.float32),
        min_p=Backed([0, 0, 0, 0, 0.1, 0] + [0] * 6, np.float32),
        seeds=Backed(np.arange(SLOTS) * 31 - 7, np.int64),
        num_logprobs=np.array([-1, 3, 0, -1, 5, -1, 2, -1, -1, -1, -1, -1]),
    )
    states.max_num_logprobs = lambda slots: int(states.num_logprobs[slots].max())
    own = SimpleNamespace(
        num_token_ids=Backed([0] * 10 + [2, 0], np.int32),
        token_ids=SimpleNamespace(gpu=torch.arange(SLOTS * 4).view(SLOTS, 4).int()),
    )
    own.max_num_token_ids = lambda slots: int(own.num_token_ids.np[slots].max(initial=0))
    counts = {name: Backed([0] * SLOTS, np.int32) for name in v2._BIAS_STAGES}
    bias = bare(Bias, use_logit_bias=np.zeros(SLOTS, bool), calls=[], **counts)
    old = request.param == "0.25"
    bad_words = bare(BadWords25 if old else BadWords32, num_bad_words=Backed([0] * SLOTS, np.int32))
    penalties = bare(Penalties, use_penalty=np.zeros(SLOTS, bool))
    layout = (
        {"logit_bias_state": bias, "bad_words_state": bad_words}
        if old
        else {"logits_processors": [bias, penalties, bad_words]}
    )
    plain = bare(
        Sampler,
        logprobs_mode="raw_logprobs",
        compute_nans=False,
        sampling_states=states,
        penalties_state=penalties,
        logprob_token_ids_state=own,
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
        **layout,
    )
    monkeypatch.setattr(v2, "get_num_sampled_and_rejected", lambda ones, *rest: (ones, ones * 0))
    runner = SimpleNamespace(corun=RunnerState(PLAN, decode_step=True))
    adopted = v2.CoRunSampler.adopt(plain, runner)
    adopted.bias, adopted.bad, adopted.pen = bias, bad_words, penalties
    return adopted


def make_batch(slots):
    n = len(slots)
    slots = np.array(slots, dtype=np.int32)
    return SimpleNamespace(
        num_reqs=n,
        idx_mapping_np=slots,
        idx_mapping=torch.from_numpy(slots),
        expanded_idx_mapping=torch.from_numpy(slots),
        expanded_local_pos=torch.zeros(n, dtype=torch.int32),
        positions=torch.arange(100, 100 + ROWS),
        input_ids=torch.zeros(ROWS, dtype=torch.int32),
        logits_indices=torch.arange(n),
        seq_lens=torch.ones(n, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.ones(n, dtype=torch.int32),
        cu_num_logits=torch.arange(n + 1),
    )


def decode(sampler, slots, logits=None):
    if logits is None:
        logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    sampler._runner.corun.padded_logits = logits
    return logits, sampler(logits[: len(slots)], make_batch(slots))


def expected_tokens(sampler, slots, logits):
    """One row at a time, from the slots' parameters and the sequence's places."""
    states, tokens = sampler.sampling_states, []
    for row, slot in enumerate(slots):
        names = ("temperature", "top_k", "top_p", "min_p", "seeds")
        one = {n: getattr(states, n).np[slot : slot + 1] for n in names}
        p = RowParams.build(1, VOCAB, CPU, **one)
        tokens.append(int(sample_rows(logits[row : row + 1], p, torch.tensor([101 + row]))[0]))
    return tokens


def test_rows_get_their_slots_parameters(sampler):
    slots = [5, 1, 11, 0, 4]
    logits, output = decode(sampler, slots)
    assert output.sampled_token_ids.shape == (5, 1)
    assert output.sampled_token_ids[:, 0].tolist() == expected_tokens(sampler, slots, logits)
    assert output.num_sampled.tolist() == [1] * 5
    assert output.num_rejected.tolist() == [0] * 5


def test_padding_rows_do_not_matter(sampler):
    slots = [2, 3, 6]
    logits, output = decode(sampler, slots)
    other = logits.clone()
    other[3:] = torch.nan
    again = decode(sampler, slots, other)[1]
    assert torch.equal(output.sampled_token_ids, again.sampled_token_ids)
    for a, b in zip(output.logprobs_tensors[:3], again.logprobs_tensors[:3], strict=True):
        assert torch.equal(a, b)


def test_a_new_request_in_the_same_slots_is_seen(sampler, monkeypatch):
    logits, _ = decode(sampler, [1, 2])
    monkeypatch.setattr(Sampler, "add_request", lambda self, slot, *rest: None)
    sampler.sampling_states.seeds.np[1] = 987_654
    sampler.sampling_states.top_k.np[2] = 1
    sampler.add_request(1, 0, None)
    _, output = decode(sampler, [1, 2], logits)
    assert output.sampled_token_ids[:, 0].tolist() == expected_tokens(sampler, [1, 2], logits)
    assert int(output.sampled_token_ids[1]) == int(logits[1].argmax())


def test_prefill_runs_at_its_own_row(sampler):
    logits = torch.randn(1, VOCAB)
    sampler._runner.corun.decode_step = False
    sampler._runner.corun.padded_logits = None
    output = sampler(logits, make_batch([3]))
    assert output.sampled_token_ids[:, 0].tolist() == expected_tokens(sampler, [3], logits)


def test_logprobs_table(sampler):
    """Rows that asked for 3, none, 5, and for two tokens of their own."""
    slots = [1, 0, 4, 10]
    logits, output = decode(sampler, slots)
    entries, values, ranks = output.logprobs_tensors[:3]
    tokens = output.sampled_token_ids[:, 0]
    scores = RowScores(logits[:4], tokens)
    assert entries.shape == values.shape == (4, 6)
    assert torch.equal(ranks, scores.rank)
    assert torch.equal(entries[:, 0], tokens)
    top = logits[:4].sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(entries[:3, 1:], top[:3, :5])
    assert entries[3, 1:3].tolist() == [40, 41]
    assert torch.equal(values[:3], scores.at(entries)[:3])
    assert torch.equal(values[3, :3], scores.at(entries)[3, :3])
    assert values[3, 3:].tolist() == [-torch.inf] * 3


def test_no_logprobs_unless_asked(sampler):
    assert decode(sampler, [0, 3, 5])[1].logprobs_tensors is None


def test_processors_touch_their_own_rows_in_order(sampler):
    """Bias comes before min_tokens: a stop token stays barred whatever its bias."""
    slots = [0, 1, 2, 3]
    logits, plain = decode(sampler, slots)
    before = logits.clone()
    sampler.sampling_states.temperature.np[:4] = 0.0  # greedy: the token shows the processing
    for slot, name in ((0, "num_allowed_token_ids"), (1, "num_logit_bias")):
        getattr(sampler.bias, name).np[slot] = 1
    sampler.bias.num_logit_bias.np[2] = sampler.bias.num_stop_token_ids.np[2] = 1
    sampler.bias.use_logit_bias[:3] = True
    sampler._added += 1
    tokens = decode(sampler, slots, logits)[1].sampled_token_ids[:, 0].tolist()
    assert tokens[:2] == [7, 9]
    assert tokens[2] != 9
    assert tokens[3] == int(logits[3].argmax())
    assert torch.equal(logits, before), "raw logits are kept for the logprobs"
    if sampler.bias.calls:  # 0.25: one stage a launch
        assert sampler.bias.calls == [[1, 0, 0], [0, 2, 0], [0, 0, 1]]
    assert plain.sampled_token_ids.shape == (4, 1)


def test_bad_words_and_penalties_reach_the_draw(sampler):
    logits = torch.zeros(ROWS, VOCAB)
    logits[:, 3], logits[:, 8] = 9.0, 8.0
    sampler.sampling_states.temperature.np[[1, 2]] = 0.0
    sampler.bad.num_bad_words.np[1] = 1
    sampler.pen.use_penalty[2] = True
    sampler._added += 1
    _, output = decode(sampler, [1, 2], logits)
    assert output.sampled_token_ids[:, 0].tolist() == [8, 3]


@pytest.mark.parametrize(
    "unknown",
    [
        {"trace_replay_state": object()},
        {"return_sampling_mask": True},
        {"logits_processors": [SimpleNamespace()]},
    ],
)
def test_unknown_ways_of_sampling_are_refused(unknown):
    runner = SimpleNamespace(sampler=bare(Sampler, **unknown), corun=RunnerState(PLAN))
    with pytest.raises(ValueError, match="cannot vouch"):
        v2.install(runner)


def test_ranks_that_do_not_sample_are_left_alone():
    runner = SimpleNamespace(sampler=None)
    v2.install(runner)
    assert runner.sampler is None
