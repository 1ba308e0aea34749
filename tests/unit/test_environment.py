import pytest

pytest.importorskip("vllm")
from corun.engine import environment


def test_pins_what_reaches_the_arithmetic():
    env: dict[str, str] = {}
    environment.settle(env)
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert env["VLLM_MOE_SKIP_PADDING"] == "0"
    assert env["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    environment.settle(env)  # its own values are no conflict


@pytest.mark.parametrize(
    "given", [{"VLLM_BATCH_INVARIANT": "1"}, {"VLLM_USE_FLASHINFER_SAMPLER": "1"}]
)
def test_a_conflict_is_refused_by_name(given):
    name = next(iter(given))
    with pytest.raises(ValueError, match=name):
        environment.settle(dict(given))


def test_an_explicit_zero_is_fine():
    environment.settle({"VLLM_BATCH_INVARIANT": "0"})
