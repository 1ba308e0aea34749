import torch
from plans import isolate

from corun.engine import lm_head
from corun.engine.runner_state import RunnerState


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
