"""corun.engine.server: vLLM's own parser and app, held by CoRun; no engine is started."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch

from corun.commands.serve import USAGE
from corun.config import CoRunConfig
from corun.engine import http, plugins, server
from corun.engine.offline import with_settings

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

# What the memory for the KV cache follows from, by model name.
MODELS = {
    name: SimpleNamespace(
        dtype=torch.float32,
        max_model_len=length,
        use_mla=False,
        get_total_num_kv_heads=lambda: 8,
        get_total_num_hidden_layers=lambda: 32,
        get_head_size=lambda: 128,
    )
    for name, length in (("m", 1024), ("long", 16384))
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("CORUN_POLICY", "CORUN_STRICT", "CORUN_STEP_LOG", "VLLM_USE_RUST_FRONTEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setattr(plugins, "plugin_installed", lambda: True)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("vllm.engine.arg_utils.get_model_path", lambda m, r: asked.append(m) or m)
    monkeypatch.setattr(EngineArgs, "create_model_config", lambda self: MODELS[self.model])
    yield
    assert set(asked) <= set(MODELS)  # offline, vLLM looks for every model that it is given


@pytest.fixture
def started(monkeypatch):
    """Stops ``vllm serve`` where it would start; a list of the arguments it would start with."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    calls: list = []
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(calls.append))
    return calls


def test_flags_reach_vllm_and_the_config_goes_in(started):
    flags = ["m", "--max-num-seqs", "12", "--additional-config", '{"other": 1}', "--port", "8123"]
    server.serve(flags, {"policy": "isolate", "strict": False})
    (args,) = started
    assert (args.model_tag, args.max_num_seqs, args.port) == ("m", 12, 8123)
    assert args.additional_config == {
        "other": 1,
        "corun": CoRunConfig(policy="isolate", strict=False).to_mapping(),
    }
    assert os.environ["VLLM_PLUGINS"] == "corun"


def test_on_a_cpu_the_kv_cache_is_moderate(started, monkeypatch):
    from corun.engine import cpu_memory

    if not cpu_memory.current_platform.is_cpu():
        pytest.skip("this vLLM is for a GPU")
    memory = SimpleNamespace(available=64 << 30)
    monkeypatch.setattr(cpu_memory.psutil, "virtual_memory", lambda: memory)
    settings = {"policy": "isolate"}
    for flags in (["m"], ["long"], ["m", "--kv-cache-memory-bytes=123456789"]):
        server.serve(flags, settings)
    server.serve(["m", "--gpu-memory-utilization=0.92"], settings)
    per_token = 2 * 32 * 8 * 128 * 4
    assert [args.kv_cache_memory_bytes for args in started] == [
        2 << 30,
        per_token * (16384 + cpu_memory.SPARE_TOKENS),
        123456789,
        None,
    ]


def test_vllms_app_gets_the_headers_and_the_report(started):
    testclient = pytest.importorskip("starlette.testclient")
    server.serve(["m"], {"policy": "isolate"})
    (module,) = http.running_servers()
    app = module.build_app(started[0], ("generate",), None)
    app.state.corun = {"policy": "isolate", "domain": "corun1-0"}
    client = testclient.TestClient(app, raise_server_exceptions=False)
    for answer in (
        client.get("/version"),
        client.post("/v1/completions", json={"max_tokens": "many"}),
        client.post("/v1/chat/completions", content=b"{", headers={"content-type": "text/x"}),
    ):
        assert answer.headers["x-corun-domain"] == "corun1-0"
    assert http.REPORT_PATH in [getattr(r, "path", None) for r in app.routes]


@pytest.mark.parametrize("flag", ["--max-num-seqq=3", "--dtype=floatt"])
def test_a_wrong_flag_is_vllms_error_with_status_2_after_our_usage(started, capsys, flag):
    with pytest.raises(SystemExit) as stopped:
        server.serve(["m", flag], {}, USAGE)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {USAGE}\ncorun serve: error: ")
    assert flag.split("=")[0] in error
    assert started == []


def test_front_ends_that_corun_does_not_reach_are_refused(started, monkeypatch):
    monkeypatch.setattr(plugins, "plugin_installed", lambda: False)
    with pytest.raises(ValueError, match="install the package 'corun-vllm'"):
        server.serve(["m"], {"policy": "isolate"})
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match="Rust front end"):
        server.serve(["m"], {"policy": "isolate"})
    assert started == []


def test_policy_off_is_plain_vllm(started, monkeypatch):
    monkeypatch.setattr(server, "register", lambda: pytest.fail("CoRun was put in place"))
    server.serve(["m", "--api-server-count=2"], {"policy": "off"})
    assert started[0].additional_config["corun"]["policy"] == "off"


def test_settings_come_from_flags_then_additional_config_then_environment(monkeypatch):
    assert with_settings(None, {})["corun"] == CoRunConfig().to_mapping()
    monkeypatch.setenv("CORUN_POLICY", "isolate")
    monkeypatch.setenv("CORUN_STRICT", "0")
    assert with_settings({"x": 1}, {}) == {
        "x": 1,
        "corun": CoRunConfig("isolate", strict=False).to_mapping(),
    }
    assert with_settings(None, {"policy": "off"})["corun"]["policy"] == "off"
    given = {"corun": {"policy": "off"}}
    assert with_settings(given, {})["corun"] == CoRunConfig(policy="off").to_mapping()
    assert with_settings(given, {"strict": False})["corun"]["policy"] == "off"
    assert given == {"corun": {"policy": "off"}}
    with pytest.raises(ValueError, match=r"'policy' to 'off'.*'isolate'; keep one of the two"):
        with_settings(given, {"policy": "isolate"})
    with pytest.raises(ValueError, match="'polcy'"):
        with_settings({"corun": {"polcy": "off"}}, {})


@pytest.mark.parametrize("died", [False, True])
def test_a_dead_engine_is_an_error(monkeypatch, died):
    from vllm.entrypoints.cli.serve import ServeSubcommand

    async def dummy_shutdown():
        pass

    async def shutdown():
        pass

    async def serve_http(app):
        return dummy_shutdown() if died else shutdown()

    def run(args):
        async def main():
            await (await module.serve_http(None))

        asyncio.run(main())

    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(run))
    (module,) = http.running_servers()
    monkeypatch.setattr(module, "serve_http", serve_http)
    if died:
        with pytest.raises(RuntimeError, match="its engine did"):
            server.serve(["m"], {"policy": "off"})
    else:
        server.serve(["m"], {"policy": "off"})
    assert module.serve_http is serve_http
