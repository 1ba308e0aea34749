"""What a certificate speaks of: whatever picks a kernel, and not what CoRun itself pins."""

import json
import os

import pytest

pytest.importorskip("vllm")
from tiny_model import TINY, environment_kept  # noqa: F401
from vllm.engine.arg_utils import EngineArgs

from corun.certify import store
from corun.config import MEASURE, CoRunConfig
from corun.engine import arguments, environment, gemm
from corun.engine import subject as subject_module
from corun.engine.explain import explain
from corun.engine.subject import subject


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("CORUN_CACHE", str(tmp_path / "cache"))
    environment.settle()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def engine_args(model, **given):
    base = {"skip_tokenizer_init": True, "max_model_len": 256, "enforce_eager": True}
    return EngineArgs(model=model, **{**base, **given})


def of(model, **given):
    args = engine_args(model, **given)
    found = subject(args, args.create_model_config(), 2048)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def differing(a, b):
    assert a.keys() == b.keys()
    return {name for name in a if a[name] != b[name]}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, set()),
        ({"model_impl": "transformers"}, {"implementation"}),
        ({"attention_config": {"flash_attn_version": 2}}, {"attention"}),
        ({"attention_config": {"flex_attn_block_m": 16}}, {"attention"}),
        ({"linear_backend": "triton"}, {"kernels"}),
        ({"moe_backend": "triton"}, {"kernels"}),
        ({"kernel_config": {"linear_backend": "torch"}}, {"kernels"}),
        ({"ir_op_priority": {"rms_norm": ["vllm_c"]}}, {"kernels"}),
        ({"enable_flashinfer_autotune": False}, {"kernels"}),
        ({"compilation_config": {"pass_config": {"eliminate_noops": False}}}, {"compilation"}),
        ({"compilation_config": {"custom_ops": ["none"]}}, {"compilation"}),
        ({"enforce_eager": False}, {"compilation", "compiled_for"}),
        ({"max_num_seqs": 3}, set()),
        ({"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}, set()),
        ({"compilation_config": {"cudagraph_capture_sizes": [8]}}, set()),
        ({"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1}}, set()),
    ],
)
def test_settings_that_pick_kernels(model, given, names):
    assert differing(of(model), of(model, **given)) == names


def test_the_code_is_named(model):
    assert of(model)["implementation"]["architecture"] == "LlamaForCausalLM"
    other = of(model, model_impl="transformers")["implementation"]
    assert (other["impl"], other["architecture"]) == ("transformers", "TransformersForCausalLM")


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("NVIDIA_TF32_OVERRIDE", "0", {"variables"}),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "high", {"variables"}),
        ("MKL_CBWR", "AVX2", {"variables"}),
        (gemm.WORKSPACE, gemm.WORKSPACE_KIB, set()),  # CoRun sets it for every certificate
        ("NCCL_ALGO", "Ring", set()),  # one device only
        ("VLLM_PORT", "5", set()),
    ],
)
def test_variables(model, monkeypatch, name, value, names):
    monkeypatch.delenv(name, raising=False)
    plain = of(model)
    monkeypatch.setenv(name, value)
    assert differing(plain, of(model)) == names


def test_a_folder_of_tuned_kernels_counts_by_its_contents(model, monkeypatch, tmp_path):
    def with_folder(name, text):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "E=8,N=64.json").write_text(text)
        monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(folder))
        return of(model)

    plain = of(model)
    first = with_folder("a", '{"1": 2}')
    assert differing(plain, first) == {"variables"}
    assert not differing(first, with_folder("b", '{"1": 2}'))
    assert differing(first, with_folder("a", '{"1": 3}')) == {"variables"}


@pytest.mark.parametrize(
    ("separate", "backend", "executor"),
    [
        (None, None, "mp"),
        ("1", None, "mp"),
        ("1", "uni", "mp"),
        ("0", None, "uni"),
        ("0", "mp", "mp"),
    ],
)
def test_workers_with_threads_of_their_own_have_certificates_of_their_own(
    model, monkeypatch, separate, backend, executor
):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    if separate is not None:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", separate)
    found = of(model, distributed_executor_backend=backend)["threads"]
    assert found["executor"] == executor
    assert found["cpus"] == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "17"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0"),
        ("VLLM_CPU_NUM_OF_RESERVED_CPU", "1"),
    ],
)
def test_what_the_number_of_threads_follows_from(model, monkeypatch, name, value):
    monkeypatch.delenv(name, raising=False)
    plain = of(model)
    monkeypatch.setenv(name, value)
    assert differing(plain, of(model)) == {"threads"}


def test_no_threads_on_a_gpu(model, monkeypatch):
    monkeypatch.setattr(type(subject_module.current_platform), "is_cpu", lambda self: False)
    args = engine_args(model)
    config = args.create_model_config()
    monkeypatch.setattr(subject_module, "device_name", lambda: "H200")
    assert subject(args, config, 2048)["threads"] is None


def test_it_is_the_same_before_and_after_the_plan_goes_in(model):
    """``choose`` reads it before, ``corun certify`` after, with CoRun's own settings in."""
    before = of(model, max_num_seqs=4, enforce_eager=True)
    args = engine_args(model, max_num_seqs=4)
    arguments.settle(args, CoRunConfig("certified", certificate=MEASURE))
    assert args.additional_config[arguments.SUBJECT_KEY] == before
    arguments.settle(args, CoRunConfig("certified", certificate=MEASURE))  # and once more
    assert args.additional_config[arguments.SUBJECT_KEY] == before


def test_an_explanation_names_the_file_that_a_start_looks_for(model):
    given = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 2048}
    _, path = explain(model, CoRunConfig("auto"), given)
    assert path == store.path_of(of(model))
