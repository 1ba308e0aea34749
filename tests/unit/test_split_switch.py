"""The switch of split decode: where it is refused, where ignored, and what it reaches."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from plans import certified
from tiny_model import TINY, environment_kept  # noqa: F401
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from corun.config import MEASURE, CoRunConfig
from corun.contract import fingerprint
from corun.engine import (
    arguments,
    compilation,
    domain,
    settings,
    split_cache,
    split_schedule,
    split_switch,
    subject,
)
from corun.engine.refusals import ASYNC_SPLIT_SCHEDULER, SPLIT_SCHEDULER
from corun.rows import Rows

# Heads of 64 dimensions, in bfloat16.
MODEL = {**TINY, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
NETWORK = torch.nn.Linear(4, 4)
MEASURED = CoRunConfig("certified", certificate=MEASURE, split_decode=True)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes EngineArgs of a model with heads of 64 dimensions."""
    monkeypatch.setenv("CORUN_CACHE", str(tmp_path / "cache"))

    def made(config=MODEL, **given):
        (tmp_path / "config.json").write_text(json.dumps(config))
        base = {"skip_tokenizer_init": True, "max_model_len": 256, "dtype": "bfloat16"}
        return EngineArgs(model=str(tmp_path), **{**base, **given})

    return made


@pytest.fixture
def gpu(monkeypatch):
    """As on an H100, as far as the switch looks."""
    hopper = SimpleNamespace(
        is_cuda=lambda: True, is_device_capability_family=lambda capability: capability == 90
    )
    monkeypatch.setattr(split_switch, "current_platform", hopper)


def why_not(args):
    return split_switch.why_not(args, args.create_model_config())


def test_on_a_cpu_it_is_refused_where_named_and_ignored_under_auto(make, caplog):
    with pytest.raises(ValueError, match="split_decode cannot run here: it needs an NVIDIA GPU"):
        arguments.settle(make(), MEASURED)
    auto = CoRunConfig("auto", split_decode=True)
    given = make()
    plan = arguments.settle(given, auto).plan
    assert (plan.policy, plan.split_beyond) == ("isolate", 0)
    assert given.additional_config["corun"]["split_decode"] is False
    assert "split-decode" not in plan.reason


def test_without_the_switch_nothing_is_asked(make, monkeypatch):
    monkeypatch.setattr(split_switch, "why_not", lambda *_: pytest.fail("asked"))
    config = CoRunConfig("certified", certificate=MEASURE)
    args = make()
    assert split_switch.settle(config, args, args.create_model_config()) is config


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, None),
        ({"attention_backend": "FLASH_ATTN"}, None),
        ({"attention_config": {"backend": "FLASH_ATTN"}}, None),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, None),
        ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, None),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, None),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "whole CUDA graphs"),
        ({"attention_backend": "TRITON_ATTN"}, "not TRITON_ATTN"),
        ({"attention_config": {"backend": "TRITON_ATTN"}}, "not TRITON_ATTN"),
        ({"dtype": "float32"}, "float32"),
        ({"config": {**MODEL, "head_dim": 96}}, "not 96"),
        ({"attention_config": {"flash_attn_version": 3}}, None),
        ({"attention_config": {"flash_attn_version": 2}}, "FlashAttention 3, not 2"),
        ({"max_num_seqs": 992}, None),
        ({"max_num_seqs": 993}, "at most 992 requests, not 993"),
    ],
)
def test_what_arguments_tell(make, gpu, given, word):
    why = why_not(make(**given))
    assert (why is None) if word is None else (word in why)


def test_other_gpus_are_refused(make, gpu, monkeypatch):
    older = SimpleNamespace(is_cuda=lambda: True, is_device_capability_family=lambda _: False)
    monkeypatch.setattr(split_switch, "current_platform", older)
    assert "compute capability 9.x" in why_not(make())


def test_more_requests_than_flash_attention_splits(make, gpu):
    with pytest.raises(ValueError, match=r"split_decode cannot run here.*993"):
        arguments.settle(make(max_num_seqs=993), MEASURED)
    given = make(max_num_seqs=993)
    assert arguments.settle(given, CoRunConfig("auto", split_decode=True)).plan.split_beyond == 0


FIELDS = {"dtype": torch.bfloat16, "use_mla": False, "get_head_size": lambda: 64}
LATENT = FIELDS | {"use_mla": True, "get_head_size": lambda: 576}


def test_rswa_is_refused(make, gpu):
    args = make()
    assert split_switch.why_not(args, SimpleNamespace(**FIELDS)) is None
    assert "R-SWA" in split_switch.why_not(args, SimpleNamespace(**FIELDS, rswa_window=64))


@pytest.mark.parametrize(
    ("given", "fields", "word"),
    [
        ({}, LATENT, None),
        ({"attention_backend": "FLASH_ATTN_MLA"}, LATENT, None),
        ({"attention_backend": "TRITON_MLA"}, LATENT, "FLASH_ATTN_MLA here, not TRITON_MLA"),
        ({"attention_backend": "FLASH_ATTN"}, LATENT, "FLASH_ATTN_MLA here, not FLASH_ATTN"),
        ({"attention_backend": "FLASH_ATTN_MLA"}, FIELDS, "FLASH_ATTN here, not FLASH_ATTN_MLA"),
        ({}, LATENT | {"get_head_size": lambda: 320}, "512 + 64 dimensions, not 320 together"),
        ({}, LATENT | {"get_head_size": lambda: 64}, "not 64 together"),
    ],
)
def test_what_is_taken_of_latent_attention(make, gpu, given, fields, word):
    why = split_switch.why_not(make(**given), SimpleNamespace(**fields))
    assert (why is None) if word is None else (word in why)


def test_the_plan_the_scheduler_and_the_subject_have_it(make, gpu):
    plain, given = make(), make()
    arguments.settle(plain, replace(MEASURED, split_decode=False))
    plan = arguments.settle(given, MEASURED).plan
    assert plan.split_beyond == split_schedule.SPLIT_BEYOND
    assert given.additional_config["corun"]["split_decode"] is True
    assert plain.scheduler_cls is None
    assert given.scheduler_cls == ASYNC_SPLIT_SCHEDULER
    assert arguments.settle(given, MEASURED).plan == plan  # a second pass changes nothing
    here, there = (a.additional_config[arguments.SUBJECT_KEY] for a in (plain, given))
    assert {n for n in there if here.get(n) != there[n]} == {"split_decode"}
    assert json.loads(json.dumps(there)) == there


def test_the_whole_way_through_create_engine_config(make, gpu):
    arguments.install()
    config = make(additional_config={"corun": MEASURED.to_mapping()}).create_engine_config()
    scheduler = config.scheduler_config
    expected = ASYNC_SPLIT_SCHEDULER if scheduler.async_scheduling else SPLIT_SCHEDULER
    assert scheduler.scheduler_cls == expected
    assert config.cache_config.enable_prefix_caching
    assert f"{split_cache.__name__}.{scheduler.get_scheduler_cls().__name__}" == expected


def test_a_graph_mode_that_vllm_chose_is_checked():
    plan = replace(certified(Rows.span(1, 64), Rows.span(1, 8)), split_beyond=2048)
    for mode, refused in (("FULL", True), ("FULL_AND_PIECEWISE", False), ("NONE", False)):
        config = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], cudagraph_capture_sizes=[])
        compilation.check(config, replace(plan, split_beyond=0))
        if refused:
            with pytest.raises(ValueError, match="FULL_AND_PIECEWISE"):
                compilation.check(config, plan)
        else:
            compilation.check(config, plan)


def test_engines_with_and_without_are_two_domains_and_two_subjects(make, monkeypatch):
    plan = certified(Rows.span(1, 64), Rows.span(1, 8))
    args = make()
    config = args.create_engine_config()

    def described(plan):
        return domain.describe(
            config,
            NETWORK,
            plan=plan.to_mapping(),
            runner="V2",
            attention=["FLASH_ATTN"],
            as_loaded={},
            endings=settings.endings(config.model_config),
        )

    off, on = described(plan), described(replace(plan, split_beyond=2048))
    assert {n for n in on if on[n] != off.get(n)} == {"split_decode"}
    assert fingerprint(on) != fingerprint(off)

    model = args.create_model_config()

    def found():
        return subject.subject(args, model, 2048, split=True)["split_decode"]

    before = found()
    assert before == on["split_decode"]
    assert "split_decode" not in subject.subject(args, model, 2048)
    with monkeypatch.context() as patched:
        patched.setattr(split_schedule, "SPLIT_BEYOND", 4096)
        assert found() != before
    for field in ("tile", "least", "most"):
        rule = split_schedule.RULES[128]
        changed = replace(rule, **{field: 2 * getattr(rule, field)})
        with monkeypatch.context() as patched:
            patched.setitem(split_schedule.RULES, 128, changed)
            assert found() != before, field


def test_latent_attention_has_a_rule_of_its_own_in_domain_and_subject(make, monkeypatch):
    args = make()
    model, ordinary = args.create_model_config(), split_schedule.reaching_bits()
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=True),
        scheduler_config=SimpleNamespace(
            long_prefill_token_threshold=0, max_num_batched_tokens=2048
        ),
    )
    plan = replace(certified(Rows.span(1, 64), Rows.span(1, 8)), split_beyond=2048).to_mapping()
    monkeypatch.setattr(type(model), "use_mla", True)

    def found():
        here = domain._shapes(plan, config, False)["split_decode"]
        assert here == subject.subject(args, model, 2048, split=True)["split_decode"]
        return here

    before = found()
    assert before["rules"] == {"512+64": {"tile": 64, "least": 4, "most": 64}}
    monkeypatch.setattr(split_schedule, "LATENT_RULE", split_schedule.SplitRule(64, 2, 64))
    assert found() != before
    monkeypatch.setattr(type(model), "use_mla", False)
    assert subject.subject(args, model, 2048, split=True)["split_decode"] == ordinary


def test_the_rule_of_ordinary_heads_is_what_certificates_name():
    """Certificates and domains that were recorded stay valid as long as this is what they hold."""
    assert split_schedule.reaching_bits() == {
        "beyond": 2048,
        "kernel": "FlashAttention 3",
        "rules": {
            "64": {"tile": 128, "least": 4, "most": 32},
            "128": {"tile": 128, "least": 4, "most": 32},
            "256": {"tile": 80, "least": 4, "most": 32},
        },
    }
