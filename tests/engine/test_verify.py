"""``corun verify`` and ``corun localize`` on real vLLM: plain vLLM fails, ``isolate`` passes."""

import json
import weakref

import pytest

from benchmarks.models import write_config
from corun.cli import main
from corun.config import CoRunConfig

SMALL = (
    "--rows", "8",
    "--engine-arg", "max_model_len=2304",
    "--engine-arg", "kv_cache_memory_bytes=1073741824",
)  # fmt: skip


def verify(model_path, tmp_path, *flags):
    """The exit status and the JSON report of one ``corun verify``."""
    path = tmp_path / "report.json"
    status = main(["verify", model_path, "--quick", "--json", str(path), *SMALL, *flags])
    report = json.loads(path.read_text())
    assert report["exit_status"] == status, report["error"]
    total = report["total"]
    print(
        f"compared {total['token_values']} token ids, {total['token_values_equal']} equal; "
        f"{total['logprob_values']} logprobs, {total['logprob_values_equal']} equal"
    )
    return status, report


def localize(model_path, tmp_path, *flags):
    """The exit status and the JSON report of one ``corun localize``."""
    path = tmp_path / "report.json"
    status = main(["localize", model_path, "--json", str(path), *SMALL, *flags])
    report = json.loads(path.read_text())
    assert report["exit_status"] == status, report["error"]
    for finding in report["findings"]:
        print(f"{finding['crowd']}: compared {finding['elements_compared']} values")
    return status, report


def test_plain_vllm_breaks_the_contract(model_path, tmp_path):
    status, report = verify(
        model_path, tmp_path, "--policy", "off", "--suite", "paper", "--dtype", "bfloat16"
    )
    assert status == 1
    assert report["verdict"] == "broke" and report["error"] is None
    total = report["total"]
    # Every logprob counts, so that a run that compared little could not pass.
    assert total["requests"] == 16 and total["token_values"] > 200
    assert total["logprobs_equal"] < total["requests"]
    assert total["first"]["reference"]["bits"] != total["first"]["observed"]["bits"]
    assert report["audit"] == [] and report["domain"] is None


def test_isolate_keeps_the_contract_in_bfloat16(model_path, tmp_path):
    flags = ("--policy", "isolate", "--dtype", "bfloat16", "--max-tokens", "10")
    status, report = verify(model_path, tmp_path, *flags)
    assert status == 0, report["failures"]
    total = report["total"]
    assert total["token_values"] == total["token_values_equal"] > 800
    assert total["logprob_values"] == total["logprob_values_equal"] > 7000
    assert total["first"] is None
    assert report["longest_request_tokens"] > 2000
    assert report["row_crossings"]["8"]["exercised"]
    assert "max_num_seqs" in report["row_crossings"]["64"]["why_not"]
    assert sum(scene["aborted"] for scene in report["scenarios"]) > 0
    engines = report["audit"]
    assert [engine["violations"] for engine in engines] == [[], []]
    assert engines[0]["domain"] == engines[1]["domain"] == report["domain"]
    assert all(engine["steps"]["prefill"] and engine["steps"]["decode"] for engine in engines)
    assert not any("refused" in text for text in report["left_out"]), report["left_out"]


def test_isolate_keeps_the_contract_in_float32(model_path, tmp_path):
    status, report = verify(
        model_path, tmp_path, "--policy", "isolate", "--suite", "paper", "--dtype", "float32"
    )
    assert status == 0, report["failures"]
    total = report["total"]
    assert total["logprob_values"] == total["logprob_values_equal"] > 200


def test_isolate_crosses_64_rows_on_random_weights(tmp_path):
    write_config("tiny-llama", tmp_path)
    flags = ("--random-weights", "--policy", "isolate", "--suite", "adversarial", "--rows", "64")
    status, report = verify(str(tmp_path), tmp_path, *flags, "--restarts", "0")
    assert status == 0, report["failures"]
    assert report["row_crossings"]["8"]["exercised"] and report["row_crossings"]["64"]["exercised"]
    total = report["total"]
    assert total["logprob_values"] == total["logprob_values_equal"] > 10_000
    assert sum("needs a tokenizer" in text for text in report["left_out"]) == 3


@pytest.mark.parametrize("policy", ["isolate", "off"])
def test_a_closed_engine_leaves_nothing_behind(tmp_path, policy):
    from corun.verify.engine import close_engine, defaults, open_engine

    write_config("tiny-llama", tmp_path)
    config = CoRunConfig(policy=policy)
    small = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 26}
    llm = open_engine(str(tmp_path), config, random_weights=True, **defaults(config, 8) | small)
    left = []

    def grab(worker):
        runner = worker.model_runner
        left.extend(map(weakref.ref, (runner, runner.get_model(), runner.kv_caches[0])))

    llm.collective_rpc(grab)
    assert all(ref() is not None for ref in left) and len(left) == 3
    close_engine(llm)
    del llm
    assert all(ref() is None for ref in left)


def test_localize_names_a_linear_layer_in_decode_under_plain_vllm(model_path, tmp_path):
    status, report = localize(model_path, tmp_path, "--dtype", "bfloat16", "--max-tokens", "16")
    assert status == 1 and report["policy"] == "off"
    joined, together = report["findings"]
    first = joined["first"]
    assert first["phase"] == "decode"
    assert first["kind"].endswith("Linear")
    assert (first["alone_shape"][0], first["crowd_shape"][0]) == (1, 8)
    assert 0 < first["differing"] < first["elements"] and 0 < first["share"] < 1
    assert together["first"]["phase"] == "prefill"


def test_localize_finds_nothing_under_isolate(model_path, tmp_path):
    status, report = localize(
        model_path, tmp_path, "--policy", "isolate", "--requests", "1", "--max-tokens", "8"
    )
    assert status == 0, report["findings"]
    assert all(finding["outcome"] == "nothing" for finding in report["findings"])
    assert sum(finding["elements_compared"] for finding in report["findings"]) > 10_000_000
