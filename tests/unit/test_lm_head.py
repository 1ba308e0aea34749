import pytest
import torch
from plans import certified, isolate

from corun.engine import lm_head
from corun.engine.runner_state import RunnerState
from corun.rows import Rows


class Model:
    """Records the rows that its head saw."""

    def __init__(self):
        self.seen = []
        self.weight = torch.randn(5, 7)

    def compute_logits(self, hidden_states):
        self.seen.append(hidden_states.clone())
        return hidden_states @ self.weight


def held():
    model, state = Model(), RunnerState(isolate(4))
    lm_head.install(model, state)
    return model, state


def test_decode_sees_all_rows_and_returns_a_view_of_the_active_ones():
    model, state = held()
    state.decode_step = True
    hidden = torch.randn(2, 5)
    logits = model.compute_logits(hidden)
    assert model.seen[0].shape == (4, 5)
    assert torch.equal(model.seen[0][:2], hidden)
    assert not model.seen[0][2:].any()
    assert logits.shape == (2, 7)
    assert state.padded_logits.shape == (4, 7)
    assert logits.data_ptr() == state.padded_logits.data_ptr()
    logits[0, 0] = -torch.inf  # a grammar mask lands in the padded tensor
    assert state.padded_logits[0, 0] == -torch.inf
    assert state.sample_rows == 4


def test_prefill_keeps_its_rows():
    model, state = held()
    assert model.compute_logits(torch.randn(1, 5)).shape == (1, 7)
    assert (state.sample_rows, state.padded_logits) == (1, None)
    # Prompt logprobs come afterwards, with as many rows as the chunk has tokens.
    assert model.compute_logits(torch.randn(3, 5)).shape == (3, 7)
    assert state.sample_rows == 1


def test_prompt_logprobs_do_not_replace_the_sampled_logits():
    model, state = held()
    state.decode_step = True
    model.compute_logits(torch.randn(1, 5))
    sampled = state.padded_logits
    assert model.compute_logits(torch.randn(1, 5)).shape == (1, 7)
    assert state.padded_logits is sampled
    assert model.seen[1].shape == (4, 5)


def test_a_full_batch_is_not_copied():
    hidden = torch.randn(4, 5)
    assert lm_head.pad_rows(hidden, 4) is hidden


def test_a_head_that_returns_nothing():
    """Tensor-parallel ranks that gather no logits return None."""
    model, state = Model(), RunnerState(isolate(4), decode_step=True)
    model.compute_logits = lambda hidden_states: None
    lm_head.install(model, state)
    assert model.compute_logits(torch.randn(2, 5)) is None
    assert state.sample_rows == 4


def held_to_a_class():
    model, state = Model(), RunnerState(certified(Rows.span(1, 64), Rows.of([4, 6])))
    lm_head.install(model, state)
    return model, state


@pytest.mark.parametrize("decode_step", [True, False])
@pytest.mark.parametrize(("active", "rows"), [(1, 4), (4, 4), (5, 6), (6, 6)])
def test_certified_pads_to_the_class(active, rows, decode_step):
    model, state = held_to_a_class()
    state.decode_step = decode_step
    hidden = torch.randn(active, 5)
    logits = model.compute_logits(hidden)
    assert model.seen[0].shape == (rows, 5)
    assert torch.equal(model.seen[0][:active], hidden)
    assert not model.seen[0][active:].any()
    assert logits.shape == (active, 7)
    # Each of the sampler's rows is computed by itself: it needs no padding.
    assert (state.sample_rows, state.padded_logits) == (rows, None)


@pytest.mark.parametrize("tokens", [1, 5, 6, 7, 13, 40])
def test_certified_prompt_logprobs_come_in_blocks(tokens):
    model, state = held_to_a_class()
    model.compute_logits(torch.randn(2, 5))
    hidden = torch.randn(tokens, 5)
    logits = model.compute_logits(hidden)
    blocks = model.seen[1:]
    assert all(len(block) in (4, 6) for block in blocks)
    assert len(blocks) == -(-tokens // 6)
    assert sum(len(block) for block in blocks) - tokens < 4
    assert torch.equal(torch.cat(blocks)[:tokens], hidden)
    assert torch.equal(logits, torch.cat([block @ model.weight for block in blocks])[:tokens])
    assert state.sample_rows == 4  # of the sampled rows, not of these


def test_certified_prompt_logprobs_of_a_head_that_returns_nothing():
    model, state = Model(), RunnerState(certified(Rows.span(1, 64), Rows.of([4, 6])))
    model.compute_logits = lambda hidden_states: None
    lm_head.install(model, state)
    assert model.compute_logits(torch.randn(2, 5)) is None
    assert model.compute_logits(torch.randn(13, 5)) is None


def test_certified_never_runs_a_shape_outside_its_class():
    model, _ = held_to_a_class()
    with pytest.raises(ValueError, match="no certified LM head shape holds 7 rows"):
        model.compute_logits(torch.randn(7, 5))
    assert model.seen == []


def test_the_models_own_head_is_returned():
    model = Model()
    own = lm_head.install(model, RunnerState(isolate(4)))
    own(torch.randn(3, 5))
    assert model.seen[0].shape == (3, 5)
