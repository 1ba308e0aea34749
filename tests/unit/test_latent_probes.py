"""What the probes do otherwise for latent attention (MLA)."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch

from corun.certify.compositions import Limits, Piece
from corun.certify.long_compositions import long_claims
from corun.engine.probes import latent
from corun.engine.probes.steps import StepRunner

STEP = (Piece(0, 0, 40), Piece(1, 0, 1), Piece(2, 9, 10), Piece(3, 5, 25))


def ordered(mla, module):
    """STEP in the order of a runner whose class is in `module`."""
    steps = object.__new__(StepRunner)
    steps._config = SimpleNamespace(model_config=SimpleNamespace(use_mla=mla))
    steps._runner = type("Runner", (), {"__module__": module})()
    return steps._order(STEP)


def test_pieces_stand_as_the_runner_puts_them():
    assert ordered(False, "vllm.v1.worker.gpu.model_runner") == [0, 1, 2, 3]
    assert ordered(True, "vllm.v1.worker.gpu.model_runner") == [1, 2, 3, 0]
    assert ordered(True, "vllm.v1.worker.gpu_model_runner") == [2, 0, 1, 3]


@pytest.mark.parametrize("by_head", [True, False])
def test_the_products_of_each_head(monkeypatch, by_head):
    monkeypatch.setattr(latent, "BY_HEAD", by_head)
    heads, width, inner, values = 3, 8, 16, 4
    layer = SimpleNamespace(
        W_UK_T=torch.randn(heads, width, inner), num_heads=heads, v_head_dim=values
    )
    x = torch.randn(5, heads * width)
    found = latent.into_latent(layer, x).view(5, heads, inner)
    for head in range(heads):
        torch.testing.assert_close(
            found[:, head], x.view(5, heads, width)[:, head] @ layer.W_UK_T[head]
        )
    weight = torch.randn(heads, inner, values)
    layer._v_up_proj = lambda x, out: torch.bmm(
        x.view(-1, heads, inner).transpose(0, 1),
        weight,
        out=out.view(-1, heads, values).transpose(0, 1),
    )
    y = torch.randn(5, heads * inner)
    out = latent.out_of_latent(layer, y).view(5, heads, values)
    for head in range(heads):
        torch.testing.assert_close(out[:, head], y.view(5, heads, inner)[:, head] @ weight[head])


def test_a_long_sequence_of_a_whole_model_is_made_again_when_a_trial_spoils_it():
    """The KV is computed: a chunk's rows that are wrong leave wrong KV behind."""
    cache: dict[int, torch.Tensor] = {}

    def made(sizes):
        def run(step, place):
            rows = []
            for piece in step:
                cut = piece.start > 0 and piece.tokens > 1
                held = cache.setdefault(piece.sequence, torch.zeros(600))
                held[piece.start : piece.stop] = torch.arange(piece.start, piece.stop) + cut
                read = held.cumsum(0)[piece.start : piece.stop]
                rows.append(read[:, None].expand(-1, 3000))
            return rows

        return run

    limits = Limits(step_tokens=700, requests=4, kv_tokens=0, sequence_tokens=600)
    found, longest, _ = long_claims("model, long", made, limits, 10_000, 0.5, given_kv=False)
    assert longest == 600
    wrong = {claim.name for claim in found if not claim.holds}
    assert wrong == {"chunks"}
