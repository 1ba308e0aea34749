"""What the domain holds: whatever changes an answer changes it, and nothing else does.

vLLM's own finished configs, a small torch model in the place of a loaded one. No engine starts.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
from plans import certified, isolate
from tiny_model import TINY, environment_kept  # noqa: F401
from vllm.engine.arg_utils import EngineArgs

from corun.contract import fingerprint
from corun.engine import domain, settings, worker_facts
from corun.plan import Grants
from corun.rows import Rows

CERTIFIED = certified(Rows.span(1, 64), Rows.span(1, 4))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(TINY))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 50}))
    return path


class Loaded(torch.nn.Sequential):
    """In the place of a loaded model."""


class Replaced(torch.nn.Linear):
    """A layer that a plugin put in the place of another."""


def loaded(kind=Loaded, layer=torch.nn.Linear):
    torch.manual_seed(0)
    return kind(layer(4, 4), torch.nn.ReLU())


def finished(model, **given):
    base = {"skip_tokenizer_init": True, "max_model_len": 256, "enforce_eager": True}
    return EngineArgs(model=str(model), **{**base, **given}).create_engine_config()


def described(config, plan=None, network=None):
    return domain.describe(
        config,
        network or loaded(),
        plan=(plan or isolate(8, 64)).to_mapping(),
        runner="CPU",
        attention=["CPU_ATTN"],
        as_loaded={},
        endings=settings.endings(config.model_config),
    )


def differing(a, b):
    assert a.keys() == b.keys()
    names = {name for name in a if a[name] != b[name]}
    assert (fingerprint(a) != fingerprint(b)) == bool(names)
    return names


def test_the_same_engine_twice_is_one_domain(model):
    first, second = (described(finished(model)) for _ in range(2))
    assert not differing(first, second)
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert " at 0x" not in json.dumps(first)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (
            {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
            "masks",
        ),
        ({"structured_outputs_config": {"backend": "guidance"}}, "masks"),
        ({"structured_outputs_config": {"enable_in_reasoning": True}}, "masks"),
        ({"structured_outputs_config": {"reasoning_parser": "qwen3"}}, "masks"),
        ({"model_impl": "transformers"}, "implementation"),
        ({"attention_config": {"flash_attn_version": 2}}, "attention_settings"),
        ({"attention_config": {"use_trtllm_attention": False}}, "attention_settings"),
        ({"attention_config": {"flex_attn_block_m": 16}}, "attention_settings"),
        ({"linear_backend": "triton"}, "kernels"),
        ({"kernel_config": {"linear_backend": "torch"}}, "kernels"),
        ({"ir_op_priority": {"rms_norm": ["vllm_c"]}}, "kernels"),
        ({"compilation_config": {"pass_config": {"eliminate_noops": False}}}, "compilation"),
        ({"compilation_config": {"custom_ops": ["none"]}}, "compilation"),
        ({"generation_config": "vllm"}, "endings"),
        ({"long_prefill_token_threshold": 16}, "long_prefill"),
    ],
)
def test_a_setting_that_changes_answers_is_in_it(model, given, name):
    assert differing(described(finished(model)), described(finished(model, **given))) == {name}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compile_sizes", [1, 8]),
        ("compile_ranges_endpoints", [64, 2048]),
        ("inductor_compile_config", {"max_autotune": True}),
        ("splitting_ops", ["aten.mm"]),
    ],
)
def test_what_a_compiler_is_told_is_in_it_if_there_is_one(model, field, value):
    def compiled(mode, changed):
        config = finished(model, enforce_eager=False)
        config.model_config.enforce_eager = False
        config.compilation_config.mode = mode
        if changed:
            setattr(config.compilation_config, field, value)
        return described(config)

    from vllm.config import CompilationMode

    full, none = CompilationMode.VLLM_COMPILE, CompilationMode.NONE
    assert differing(compiled(full, False), compiled(full, True)) == {"compilation"}
    assert not differing(compiled(none, False), compiled(none, True))


def test_a_field_that_a_later_vllm_adds_is_in_it(model):
    config = finished(model)
    found = settings.fields_of(config.attention_config)
    public = {f for f in config.attention_config.__dataclass_fields__ if f[0] != "_"}
    assert found.keys() == public and len(public) >= 12


def test_the_tokens_that_end_a_request_are_in_it(model, tmp_path, monkeypatch):
    plain = described(finished(model))
    none = {"tokenizer_eos": None, "vocabulary": None}
    assert plain["endings"] == {"eos": 2, **none, "sampling": {"top_k": 50}}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [198, 2]}))
    other = described(finished(model, generation_config=str(tmp_path)))
    assert other["endings"] == {"eos": [2, 198], **none, "sampling": {}}
    assert differing(plain, other) == {"endings"}

    def with_words(words):
        tokenizer = SimpleNamespace(eos_token_id=7, get_vocab=lambda: words)
        with monkeypatch.context() as patch:
            patch.setattr(settings, "cached_tokenizer_from_config", lambda config: tokenizer)
            return described(finished(model))

    told = with_words({"a": 0, "b": 1})
    assert told["endings"]["tokenizer_eos"] == 7
    assert differing(plain, told) == {"endings"}
    assert not differing(told, with_words({"b": 1, "a": 0}))
    # Other words for the same ids: structured outputs allow other tokens.
    assert differing(told, with_words({"a": 1, "b": 0})) == {"endings"}


def test_a_cpus_caches_are_in_its_name(monkeypatch):
    """vLLM's CPU attention cuts the KV by the L2 cache's size."""
    sizes = {"l1d_cache_size": 49152, "l2_cache_size": 2097152}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: sizes, raising=False)
    one = domain.device_name()
    assert one.endswith(" l1d:49152 l2:2097152")
    monkeypatch.setitem(sizes, "l2_cache_size", 1048576)
    assert domain.device_name() != one


def test_a_reasoning_plugin_is_in_it_by_its_contents(model, tmp_path):
    def with_plugin(name, text):
        file = tmp_path / name / "plugin.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return described(finished(model, reasoning_parser_plugin=str(file)))

    first = with_plugin("here", "A = 1")
    assert not differing(first, with_plugin("there", "A = 1"))
    assert differing(first, with_plugin("here", "A = 2")) == {"masks"}


def test_the_code_of_the_model_is_in_it(model):
    class Other(torch.nn.Sequential):
        """The same layers and weights, by another class."""

    config = finished(model)
    plain = described(config)
    assert plain["implementation"]["class"] == f"{__name__}.Loaded"
    assert plain["implementation"]["architecture"] == "LlamaForCausalLM"
    assert differing(plain, described(config, network=loaded(Other))) == {"implementation"}
    replaced = loaded(layer=Replaced)
    assert differing(plain, described(config, network=replaced)) == {"implementation"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVIDIA_TF32_OVERRIDE", "0"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"),
        ("TORCH_BLAS_PREFER_CUBLASLT", "1"),
        ("CUBLASLT_WORKSPACE_SIZE", "1"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "high"),
        ("VLLM_MARLIN_USE_ATOMIC_ADD", "1"),
        ("VLLM_CPU_MOE_PREPACK", "0"),
        ("MKL_CBWR", "AVX2"),
        ("KMP_DYNAMIC_MODE", "load_balance"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2"),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", "1"),
    ],
)
def test_variables_that_change_kernels_are_in_it(model, monkeypatch, name, value):
    config = finished(model)
    monkeypatch.delenv(name, raising=False)
    plain = described(config)
    monkeypatch.setenv(name, value)
    assert differing(plain, described(config)) == {"variables"}


def test_a_worker_in_its_own_process_with_as_many_threads_is_the_same(model, monkeypatch):
    config = finished(model)
    plain = described(config)
    # vLLM's OMPProcessManager sets these for a worker of its own.
    cpus = {"OMP_NUM_THREADS": "2", "OMP_PLACES": "{0,1}", "OMP_PROC_BIND": "true"}
    more = {"KMP_AFFINITY": "x", "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0", "GOMP_CPU_AFFINITY": "0"}
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_DP_RANK": "1", "VLLM_DP_SIZE": "2"}
    where = {"VLLM_PORT": "5", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CACHE_ROOT": "/elsewhere"}
    for name, value in {**cpus, **more, **apart, **where}.items():
        monkeypatch.setenv(name, value)
    assert not differing(plain, described(config))


def test_threads_and_torchs_precision_are_in_it(model, monkeypatch):
    config = finished(model)
    plain = described(config)
    assert plain["worker"]["threads"] == torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(worker_facts.torch, "get_num_threads", lambda: 77)
        assert differing(plain, described(config)) == {"worker"}
    try:
        torch.set_float32_matmul_precision("medium")
        assert differing(plain, described(config)) == {"worker"}
    finally:
        torch.set_float32_matmul_precision("highest")


def test_certified_engines_of_other_sizes_are_one_domain(model):
    plan = replace(CERTIFIED, class_of=(64, 8))
    small = finished(model, max_num_seqs=4, max_num_batched_tokens=64)
    large = finished(model, max_num_seqs=8, max_num_batched_tokens=256)
    larger = replace(plan, decode_rows=8, max_prefill_tokens=256)
    assert not differing(described(small, plan), described(large, larger))
    other = replace(larger, class_of=(128, 8))
    assert differing(described(large, larger), described(large, other)) == {"row_classes"}


def test_where_a_prompt_is_cut_is_in_it_unless_it_does_not_matter(model):
    plan = replace(CERTIFIED, grants=Grants(mixed=True))
    config, cut = finished(model), finished(model, long_prefill_token_threshold=16)
    assert differing(described(config, plan), described(cut, plan)) == {"chunks"}
    shorter = replace(plan, max_prefill_tokens=plan.max_prefill_tokens - 1)
    assert differing(described(config, plan), described(config, shorter)) == {"chunks"}
    free = replace(plan, grants=Grants(free_chunks=True))
    assert not differing(described(config, free), described(cut, free))


def test_collectives_are_in_it_between_devices_only(model, monkeypatch):
    config = finished(model)
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    plain = described(config)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert not differing(plain, described(config))
    config.parallel_config.tensor_parallel_size = 2
    ring = described(config)
    assert ring["variables"]["NCCL_ALGO"] == "Ring"
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert differing(ring, described(config)) == {"variables"}
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    config.parallel_config.disable_custom_all_reduce ^= True
    assert differing(ring, described(config)) == {"tensor_parallel"}
