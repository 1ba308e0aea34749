"""The KV cache's memory on a CPU: moderate, room for one request, and the user's word rules."""

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from corun.engine import cpu_memory
from corun.verify.engine import CPU_KV_BYTES

GIB = 1 << 30
PER_TOKEN = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M in bfloat16


def model(max_model_len=8192, use_mla=False):
    return SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=max_model_len,
        use_mla=use_mla,
        get_total_num_kv_heads=lambda: 3,
        get_total_num_hidden_layers=lambda: 30,
        get_head_size=lambda: 64,
    )


def engine(config=None, **given):
    values = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.92}
    return SimpleNamespace(
        **{**values, "tensor_parallel_size": 1, **given},
        create_model_config=lambda: config or model(),
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 24 GiB free; returns a setter."""
    monkeypatch.delenv(cpu_memory.SPACE_VARIABLE, raising=False)

    def free(gib):
        memory = SimpleNamespace(available=int(gib * GIB))
        monkeypatch.setattr(cpu_memory.psutil, "virtual_memory", lambda: memory)

    free(24)
    return free


def settled(args, flags=()):
    cpu_memory.settle(args, args, flags)
    return args.kv_cache_memory_bytes


def test_a_small_model_gets_what_verification_takes(caplog):
    logger = logging.getLogger("vllm.corun")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    try:
        assert settled(engine()) == CPU_KV_BYTES
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.NOTSET)
    (line,) = {record.getMessage() for record in caplog.records}
    assert "2.0 GiB" in line
    assert f"{CPU_KV_BYTES // PER_TOKEN:,} tokens" in line
    assert "--kv-cache-memory-bytes" in line


@pytest.mark.parametrize("length", [131072, 200000])
def test_one_request_of_any_length_fits(length):
    chosen = settled(engine(model(length)))
    assert chosen > CPU_KV_BYTES
    # A block of 128 tokens is vLLM's null block, the request's last one may be nearly empty.
    assert chosen // (128 * PER_TOKEN) >= 1 + -(-length // 128)


def test_never_more_than_half_of_what_is_free(machine):
    machine(3)
    assert settled(engine()) == 3 * GIB // 2


def test_parallel_workers_share_a_request():
    alone, shared = (
        settled(engine(model(2**20))),
        settled(engine(model(2**20), tensor_parallel_size=2)),
    )
    assert alone == 12 * GIB  # half of what is free
    assert shared == PER_TOKEN // 2 * (2**20 + cpu_memory.SPARE_TOKENS)


def test_latent_attention_keeps_one_vector():
    long = 2**22
    assert settled(engine(model(long, use_mla=True)), ()) == min(
        12 * GIB, 30 * 64 * 2 * (long + cpu_memory.SPARE_TOKENS)
    )


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"kv_cache_memory_bytes": 5}, ()),
        ({"gpu_memory_utilization": 0.5}, ()),
        ({}, ("--gpu-memory-utilization=0.92",)),
        ({}, ("--gpu_memory_utilization", "0.92")),
    ],
)
def test_the_users_word_rules(given, flags):
    assert settled(engine(**given), flags) == given.get("kv_cache_memory_bytes")


def test_vllms_own_variable_rules(monkeypatch):
    monkeypatch.setenv(cpu_memory.SPACE_VARIABLE, "4")
    assert settled(engine()) is None


def test_a_gpu_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr(cpu_memory.current_platform, "is_cpu", lambda: False)
    assert settled(engine()) is None
