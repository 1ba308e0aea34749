"""Split decode in a whole engine on the CPU: certified, then verified with preemption and caching.

FlashAttention 3 needs a GPU. In its place stands vLLM's own CPU attention, and what it is told to
split, by the schedule that it gets, is marked: its output is scaled by a little. So a row that is
split where it must not be, or the other way round, in any layer and any step, changes bits.
Everything else is what runs on a GPU: the rule, the rows of each step, the prefix cache, the
probes, the plan. Contexts stay short: from about 1,400 tokens on vLLM's CPU attention itself
depends on where a prompt is cut.
"""

import copy
import json
import sys
from types import ModuleType

import pytest

pytest.importorskip("vllm")
import torch
from conftest import LAYERS
from vllm import SamplingParams
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from corun.cli import main
from corun.config import CoRunConfig
from corun.engine import attention, choose, split_attention, split_schedule, split_switch
from corun.engine.split_schedule import SplitRule
from corun.verify.compare import compare
from corun.verify.engine import close_engine, defaults, open_engine
from corun.verify.record import record_of

BEYOND, MARK = 64, 1 + 2**-7
RULE = SplitRule(tile=16, least=1, most=32)
ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 1 << 29,
    "block_size": 32,
}
FLASH = "vllm.vllm_flash_attn"
forward = CPUAttentionBackendImpl.forward


def get_scheduler_metadata(*, batch_size, num_splits, **_):
    """A schedule of FlashAttention 3's size, with numbers of splits that nobody wants."""
    assert num_splits == RULE.most
    return torch.full((2 * ((batch_size + 3) // 4 * 4) + 1,), 9, dtype=torch.int32)


def marked(self, layer, query, key, value, kv_cache, attn_metadata, output, **more):  # noqa: PLR0917
    """As vLLM's, but what the schedule splits is marked."""
    if getattr(attn_metadata, "max_num_splits", 1) == 1:
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **more)
    rows, schedule = len(attn_metadata.seq_lens), attn_metadata.scheduler_metadata
    padded = (rows + 3) // 4 * 4
    split = (schedule[padded : padded + rows] > 1).nonzero().flatten()
    plain = copy.copy(attn_metadata)
    plain.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=rows, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
        head_dim=self.head_size, seq_lens=plain.seq_lens, dtype=query.dtype,
        query_start_loc=plain.query_start_loc, causal=True, sliding_window_size=-1, isa=layer.isa,
        enable_kv_split=False,
    )  # fmt: skip
    forward(self, layer, query, key, value, kv_cache, plain, output, **more)
    output[split] *= MARK
    marked.rows += len(split)
    return output


def hold(builder, state):
    """As for FLASH_ATTN, but the first call of a step computes every row: it takes no length 0."""
    build = builder.build

    def held(*args, **kwargs):
        metadata = build(*args, **kwargs)
        if state.split is not None:
            decode = metadata.max_query_len == 1
            state.split.attach(metadata, builder, decode=decode, longest=1)
            if not decode and (step := getattr(metadata, "corun_split", None)) is not None:
                step.left = metadata.seq_lens
        return metadata

    builder.build = held


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Split decode on the CPU, from BEYOND tokens on, and a place for its certificate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORUN_CACHE", str(tmp_path_factory.mktemp("cache")))
        for module in (choose, split_schedule):
            patch.setattr(module, "SPLIT_BEYOND", BEYOND)
        patch.setitem(split_schedule.RULES, 64, RULE)
        patch.setattr(split_switch, "why_not", lambda args, model_config: None)
        patch.setattr(split_attention, "why_not", lambda layer: None)
        patch.setitem(attention.HOLD, "CPU_ATTN", hold)
        patch.setattr(CPUAttentionBackendImpl, "forward", marked)
        patch.setitem(sys.modules, FLASH, ModuleType(FLASH))
        interface = ModuleType(f"{FLASH}.flash_attn_interface")
        interface.get_scheduler_metadata = get_scheduler_metadata
        patch.setitem(sys.modules, interface.__name__, interface)
        marked.rows = 0
        yield


def flags(**more):
    return ["--split-decode", "--rows=8", "--no-progress"] + [
        f"--engine-arg={name}={value}" for name, value in {**ENGINE, **more}.items()
    ]


@pytest.fixture(scope="module")
def report(kept, shallow_model, tmp_path_factory):
    """The report of ``corun certify``."""
    path = tmp_path_factory.mktemp("certify") / "report.json"
    assert main(["certify", shallow_model, "--budget=6", f"--json={path}", *flags()]) == 0
    return json.loads(path.read_text())


def test_split_rows_are_certified_by_themselves(report):
    steps = report["certificate"]["steps"]
    split = [claim for claim in steps if claim["operation"].endswith("split rows")]
    assert len(split) == 10, "five properties, of attention and of the model"
    assert all(claim["holds"] and claim["values"] >= 100_000 for claim in split)
    assert report["certificate"]["domain"]["split_decode"]["beyond"] == BEYOND
    assert {v["policy"]: v["allowed"] for v in report["policies"]} == {
        "certified": True,
        "pack": False,
        "isolate": True,
    }


def test_the_contract_holds_with_preemption_and_caching(report, shallow_model, tmp_path):
    path, before = tmp_path / "verify.json", marked.rows
    given = ["--policy=certified", "--suite=adversarial", "--quick", "--restarts=0"]
    given += ["--max-tokens=40", f"--json={path}", *flags(num_gpu_blocks_override=35)]
    assert main(["verify", shallow_model, *given]) == 0
    found = json.loads(path.read_text())
    total, audit = found["total"], found["audit"][0]
    print(f"compared {total['token_values']} tokens, {total['logprob_values']} logprobs")
    assert total["logprob_values"] > 1000
    for name in ("mixed_steps", "preempted", "cached_tokens", "split_rows"):
        assert audit[name] > 0, name
    assert marked.rows - before == audit["split_rows"] * LAYERS, "no row missed, none twice"


def test_a_second_turn_does_not_start_behind_split_rows(report, shallow_model):
    """The next prompt holds what was decoded before; its bits are those of a fresh engine."""
    config = CoRunConfig("certified", split_decode=True)
    llm = open_engine(shallow_model, config, **{**defaults(config, 8), **ENGINE})
    first = [(7 * i) % 1000 + 20 for i in range(40)]

    def turn(prompt, tokens):
        params = SamplingParams(temperature=0.6, seed=5, max_tokens=tokens, logprobs=3)
        return llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]

    try:
        said = turn(first, 150).outputs[0].token_ids
        second = [*first, *said]
        assert len(second) > BEYOND + 2 * ENGINE["block_size"]
        assert llm.reset_prefix_cache()
        alone = turn(second, 30)
        assert llm.reset_prefix_cache()
        turn(first, 150)
        behind = turn(second, 30)
    finally:
        close_engine(llm)
    assert behind.num_cached_tokens == BEYOND, "the blocks that no split row wrote"
    found = compare(record_of("second", 5, alone), record_of("second", 5, behind))
    print(f"compared {found.token_values} tokens, {found.logprob_values} logprobs")
    assert found.identical and found.logprob_values > 80
