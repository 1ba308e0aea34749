"""CUDA graphs and the compiler under a certified plan. No engine starts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from plans import certified, isolate
from vllm.engine.arg_utils import EngineArgs

from corun.engine import compilation
from corun.rows import Rows

EVERY = certified(Rows.span(1, 8192), Rows.span(1, 256))
ODD = Rows.of([*range(5, 33), 40, 48, *range(512, 1025)])


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch):
    monkeypatch.setattr(compilation.current_platform, "is_cpu", lambda: False)


@pytest.fixture
def args(tmp_path):
    """A function that makes engine arguments for a local model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))

    def make(**kwargs):
        return EngineArgs(model=str(tmp_path), **kwargs)

    return make


def sizes_of(given):
    return given.compilation_config.cudagraph_capture_sizes


def test_vllms_own_sizes_where_all_are_certified(args):
    given = args()
    assert compilation.settle_graphs(given, EVERY).decode_graph
    assert sizes_of(given) is None
    assert given.compilation_config.cudagraph_mode is None


def test_sizes_are_those_of_the_class(args):
    given = args()
    assert compilation.settle_graphs(given, certified(ODD, Rows.span(1, 32))).decode_graph
    assert sizes_of(given) == [8, 16, 24, 32, 40, 48, 512]
    assert set(sizes_of(given)) <= set(ODD)


def test_one_size_where_no_usual_one_is_certified(args):
    given = args()
    compilation.settle_graphs(given, certified(Rows.span(5, 7), Rows.span(1, 4)))
    assert sizes_of(given) == [5]


@pytest.mark.parametrize("where", ["argument", "config"])
def test_sizes_that_were_asked_for(args, where):
    def asked(sizes):
        if where == "argument":
            return args(cudagraph_capture_sizes=sizes)
        return args(compilation_config={"cudagraph_capture_sizes": sizes})

    plan = certified(ODD, Rows.span(1, 32))
    with pytest.raises(ValueError, match=r"cudagraph_capture_sizes=.*4 rows are not certified"):
        compilation.settle_graphs(asked([4, 8]), plan)
    given = asked([8, 40])
    assert compilation.settle_graphs(given, plan).decode_graph
    assert [8, 40] in (given.cudagraph_capture_sizes, sizes_of(given))


def test_no_graphs(args, monkeypatch):
    plan = certified(ODD, Rows.span(1, 32))
    for given in (args(enforce_eager=True), args(compilation_config={"cudagraph_mode": "NONE"})):
        assert not compilation.settle_graphs(given, plan).decode_graph
        assert sizes_of(given) is None
    monkeypatch.setattr(compilation.current_platform, "is_cpu", lambda: True)
    assert not compilation.settle_graphs(args(), plan).decode_graph


def test_isolate_has_one_full_graph_and_pieces_for_prefills(args):
    given = args()
    plan = compilation.settle_graphs(given, isolate(200, tokens=600))
    assert plan.decode_graph
    assert plan.prefill_rows == (200, 256, 384, 512)
    assert given.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
    assert sizes_of(given) == [200, 256, 384, 512]
    assert [plan.rows_for(n, decode=False) for n in (1, 200, 201, 512, 513, 600)] == [
        *(200, 200, 256, 512),
        *(513, 600),
    ]
    again = compilation.settle_graphs(given, isolate(200, tokens=600))  # vLLM settles twice
    assert again == plan
    assert sizes_of(given) == [200, 256, 384, 512]


@pytest.mark.parametrize(
    "how",
    [
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        {"compilation_config": {"mode": 0}},
        {"optimization_level": 0},
    ],
)
def test_isolate_without_pieces(args, how):
    given = args(**how)
    plan = compilation.settle_graphs(given, isolate(16))
    assert (plan.decode_graph, plan.prefill_rows) == (True, ())
    assert given.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert sizes_of(given) == [16]
    assert plan.rows_for(5, decode=False) == 5


def test_pack_has_no_pieces(args):
    given = args()
    plan = compilation.settle_graphs(given, replace(isolate(16), policy="pack"))
    assert (plan.decode_graph, plan.prefill_rows) == (True, ())
    assert given.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"


def test_graphs_that_isolate_refuses(args):
    with pytest.raises(ValueError, match="cudagraph_capture_sizes"):
        compilation.settle_graphs(args(cudagraph_capture_sizes=[1, 2, 4]), isolate(16))
    pieces_only = args(compilation_config={"cudagraph_mode": "PIECEWISE"})
    with pytest.raises(ValueError, match="cudagraph_mode"):
        compilation.settle_graphs(pieces_only, isolate(16))
    eager = compilation.settle_graphs(args(enforce_eager=True), isolate(16))
    assert (eager.decode_graph, eager.prefill_rows) == (False, ())


def test_the_compiler_always_compiles_for_the_same_range(args, monkeypatch):
    assert compilation.tokens_compiled_for(args(), 512, 8192) == 8192
    assert compilation.tokens_compiled_for(args(), 16384, 8192) == 16384
    assert compilation.tokens_compiled_for(args(enforce_eager=True), 512, 8192) == 512
    monkeypatch.setattr(compilation.current_platform, "is_cpu", lambda: True)
    assert compilation.tokens_compiled_for(args(), 512, 8192) == 512


def test_what_inductor_would_choose_by_timing_is_pinned(args):
    import torch._inductor.config as inductor

    given = args(compilation_config={"inductor_compile_config": {"max_autotune": False}})
    compilation.settle_determinism(given)
    found = given.compilation_config.inductor_compile_config
    assert found["max_autotune"] is False
    pinned = {n: v for n, v in compilation.PINNED_INDUCTOR.items() if hasattr(inductor, n)}
    assert pinned.items() <= found.items()
    assert "deterministic" in pinned  # this torch has it
    contrary = args(compilation_config={"inductor_compile_config": {"deterministic": False}})
    compilation.settle_determinism(contrary)
    assert contrary.compilation_config.inductor_compile_config["deterministic"] is True


def test_a_setting_that_this_torch_lacks_is_not_set(args, monkeypatch):
    monkeypatch.setitem(compilation.PINNED_INDUCTOR, "no_such_setting_of_inductor", True)
    given = args()
    compilation.settle_determinism(given)
    found = given.compilation_config.inductor_compile_config
    assert "no_such_setting_of_inductor" not in found


def finished(mode, sizes):
    return SimpleNamespace(cudagraph_mode=SimpleNamespace(name=mode), cudagraph_capture_sizes=sizes)


@pytest.mark.parametrize(
    ("mode", "sizes", "plan", "words"),
    [
        ("FULL_AND_PIECEWISE", [8, 40], certified(ODD, Rows.span(1, 32)), None),
        ("FULL_AND_PIECEWISE", [4, 8], certified(ODD, Rows.span(1, 32)), r"\[4\] rows"),
        ("NONE", [4, 8], certified(ODD, Rows.span(1, 32)), None),
        ("NONE", None, certified(ODD, Rows.span(1, 32)), None),
        ("FULL_DECODE_ONLY", [8], isolate(8, graph=True), None),
        ("FULL_AND_PIECEWISE", [8, 128], isolate(8, graph=True, prefill_rows=(8, 128)), None),
        ("FULL_AND_PIECEWISE", [8], isolate(8, graph=True, prefill_rows=(8, 128)), "changed the"),
        ("FULL_DECODE_ONLY", [8], isolate(8, graph=True, prefill_rows=(8, 128)), "changed the"),
        ("FULL_DECODE_ONLY", [8, 16], isolate(8, graph=True), "changed the decode graph"),
        ("PIECEWISE", [8], isolate(8, graph=True), "changed the decode graph"),
        ("NONE", [], isolate(8, graph=True), "changed the decode graph"),
        ("NONE", [], isolate(8), None),
    ],
)
def test_the_finished_config_is_checked(mode, sizes, plan, words):
    if words is None:
        compilation.check(finished(mode, sizes), plan)
        return
    with pytest.raises(ValueError, match=words):
        compilation.check(finished(mode, sizes), plan)
