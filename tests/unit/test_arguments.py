"""Which engine settings pass, which are switched off, which are refused. No engine starts."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from tiny_model import TINY
from vllm.engine.arg_utils import EngineArgs

from corun.config import CoRunConfig
from corun.engine import arguments, refusals
from corun.engine.scheduler_limits import never_starts
from corun.plan import Grants, Plan

ISOLATE = CoRunConfig("isolate")


@pytest.fixture(autouse=True)
def no_certificates(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("CORUN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def args(model, **kwargs):
    return EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=256, **kwargs)


def test_the_plan_goes_in(model, monkeypatch):
    given = args(model, max_num_seqs=16, max_num_batched_tokens=64)
    plan = arguments.settle(given, ISOLATE).plan
    assert (plan.policy, plan.decode_rows, plan.max_prefill_tokens) == ("isolate", 16, 64)
    assert given.enable_prefix_caching is False
    assert given.disable_cascade_attn is not False  # 0.32 has none left, and takes no setting
    assert given.additional_config["corun"]["policy"] == "isolate"
    # What Inductor picks by timing may differ from start to start, under this policy too.
    assert given.compilation_config.inductor_compile_config["deterministic"] is True
    assert arguments.settle(given, ISOLATE).plan == plan  # a second pass changes nothing


def test_defaults_are_one_domain_on_every_entry_point(model):
    plan = arguments.settle(args(model), ISOLATE).plan
    assert (plan.decode_rows, plan.max_prefill_tokens) == (
        arguments.CPU_ROWS,
        arguments.CPU_TOKENS,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_prefix_caching", True),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3}),
        ("enable_lora", True),
        ("enable_eplb", True),
        ("enable_expert_parallel", True),
        ("enable_dbo", True),
        ("pipeline_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("kv_offloading_size", 4.0),
        ("logits_processors", ["some.processor"]),
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8"),
        ("use_fp64_gumbel", True),
        ("enable_flashinfer_autotune", True),
        ("scheduler_cls", "my.Scheduler"),
        ("worker_cls", "my.Worker"),
        ("max_num_scheduled_tokens", 64),
    ],
)
def test_what_breaks_the_contract_is_refused_by_name(model, name, value):
    given = args(model)
    if not hasattr(given, name):
        pytest.skip(f"this vLLM has no {name}")
    setattr(given, name, value)
    with pytest.raises(ValueError, match=rf"{name}=.*because"):
        arguments.settle(given, ISOLATE)


def test_autotuning_is_refused_in_the_kernel_config_too(model):
    given = args(model, kernel_config={"enable_flashinfer_autotune": True})
    with pytest.raises(ValueError, match=r"kernel_config.*timing"):
        arguments.settle(given, ISOLATE)


def test_every_refusal_and_switch_names_a_field_of_some_tested_version():
    names = {f.name for f in dataclasses.fields(EngineArgs)}
    only_025 = {"max_num_partial_prefills", "calculate_kv_scales"}
    for name in [r.name for r in refusals.REFUSED] + [n for n, _ in arguments.SWITCHED_OFF]:
        assert name in names | only_025, name


def test_a_chunk_must_hold_a_decode_step(model):
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(8\) is below max_num_seqs"):
        arguments.settle(args(model, max_num_seqs=16, max_num_batched_tokens=8), ISOLATE)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_no_rows_and_no_tokens_are_refused_by_name(model, name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not {value}"):
        arguments.settle(args(model, **{name: value}), ISOLATE)


GRANTS = {
    "certified": Grants.everything(),
    "pack": Grants(batched_prefill=True),
    "isolate": Grants(),
}


@pytest.mark.parametrize("policy", GRANTS)
def test_a_prompt_that_could_never_start_is_refused_under_every_plan(model, monkeypatch, policy):
    """vLLM itself is content: 256 tokens are asked for. The plan allows a step 32 of them."""
    sparse = Plan(policy, 8, 32, False, "test", GRANTS[policy])
    monkeypatch.setattr(arguments, "choose", lambda *args, **kwargs: sparse)
    monkeypatch.setenv("CORUN_POLICY", "isolate")
    arguments.install()
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256 if sparse.constrained else 32}
    args(model, **limits).create_engine_config()
    off = args(model, **limits, enable_chunked_prefill=False)
    # Where the batch itself is that small, vLLM's own check comes first.
    why = "enable_chunked_prefill=False.*at most 32 tokens.*max_model_len is 256"
    with pytest.raises(ValueError, match=why if sparse.constrained else "max_model_len"):
        off.create_engine_config()
    fits = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=32,
        enable_chunked_prefill=False,
        **limits,
    )
    assert fits.create_engine_config().model_config.max_model_len == 32


@pytest.mark.parametrize("budget", [32, 256])
@pytest.mark.parametrize("text_only", [True, False])
def test_an_image_that_could_never_start_is_refused(budget, text_only):
    """Only where images are taken, in steps that are shorter than vLLM's check believes."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_scheduled_tokens=budget,
            max_num_batched_tokens=256,
            enable_chunked_prefill=True,
            disable_chunked_mm_input=True,
        ),
        model_config=SimpleNamespace(
            max_model_len=512, multimodal_config=SimpleNamespace(language_model_only=text_only)
        ),
    )
    found = list(never_starts(config))
    assert len(found) == (budget == 32 and not text_only)
    assert all("disable_chunked_mm_input" in why and "at most 32" in why for why in found)


@pytest.mark.parametrize("policy", ["pack", "certified"])
def test_policies_that_need_a_certificate(model, policy):
    with pytest.raises(ValueError, match="certificate"):
        arguments.settle(args(model), CoRunConfig(policy))


def test_auto_is_isolate_and_says_why(model):
    plan = arguments.settle(args(model), CoRunConfig("auto")).plan
    assert plan.policy == "isolate"
    assert "certificate" in plan.reason


def test_off_changes_nothing(model, monkeypatch):
    monkeypatch.delenv("CORUN_POLICY", raising=False)
    arguments.install()
    config = args(model, max_num_seqs=4, max_num_batched_tokens=256).create_engine_config()
    assert arguments.PLAN_KEY not in config.additional_config
    assert config.scheduler_config.scheduler_cls is None


def test_the_whole_way_through_create_engine_config(model, monkeypatch):
    monkeypatch.setenv("CORUN_POLICY", "isolate")
    arguments.install()
    arguments.install()
    config = args(model, max_num_seqs=4, max_num_batched_tokens=256).create_engine_config()
    assert config.additional_config[arguments.PLAN_KEY]["decode_rows"] == 4
    assert config.parallel_config.worker_cls == arguments.CPU_WORKER
    assert config.scheduler_config.scheduler_cls == refusals.SCHEDULER  # sync on the CPU
    assert config.cache_config.enable_prefix_caching is False
    assert config.kernel_config.enable_flashinfer_autotune is False  # vLLM's default is on


def test_additional_config_can_turn_the_environment_off(model, monkeypatch):
    monkeypatch.setenv("CORUN_POLICY", "isolate")
    arguments.install()
    given = args(model, additional_config={"corun": {"policy": "off"}})
    assert arguments.PLAN_KEY not in given.create_engine_config().additional_config


def test_quantization_from_the_model_is_refused_too(model, monkeypatch):
    config = args(model).create_engine_config()
    config.model_config.quantization = "fp8"
    with pytest.raises(ValueError, match="quantization fp8"):
        arguments.check_config(config, arguments.settle(args(model), ISOLATE))


def test_ranks_that_would_draw_their_own_seeds_are_refused(model):
    config = args(model).create_engine_config()
    config.parallel_config.distributed_executor_backend = "external_launcher"
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ValueError, match="external launcher"):
        arguments.check_config(config, arguments.settle(args(model), ISOLATE))
