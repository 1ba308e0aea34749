import argparse
import json
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("vllm")

from corun.bench import operator_bench, operators, timing
from corun.bench.operator_bench import Bench, Point, measure_all
from corun.bench.operators import grid
from corun.engine import invariant_ops

CPU = torch.device("cpu")


def parse(*flags):
    parser = argparse.ArgumentParser()
    operators.add_arguments(parser)
    return parser.parse_args(flags)


def test_the_grid_has_every_shape_once():
    points = grid((1, 32), 512, (256, 512), 32)
    assert len(points) == len(set(points)) == 4 + 3 * 2 + 1  # 32 x 512 x 512 is in the grid
    assert {(p.k, p.n) for p in points if p.rows == 32 and p.operator == "matmul"} == {
        (a, b) for a in (256, 512) for b in (256, 512)
    }
    assert all((p.k is None) == (p.operator != "matmul") for p in points)


def test_time_calls_takes_turns_and_measures():
    seen = []

    def call(name, seconds):
        seen.append(name)
        time.sleep(seconds)

    calls = [lambda: call("a", 0.002), lambda: call("b", 0.002)]
    found = timing.time_calls(calls, CPU, repeats=7, limit_s=60)
    assert found.repeats == 7 and 2000 <= found.median_us < 20_000
    assert seen == ["a", *"abababa"]  # the first call warms up


def test_the_limit_ends_a_measurement_but_not_too_soon():
    found = timing.time_calls([lambda: time.sleep(0.01)], CPU, repeats=10_000, limit_s=0.2)
    assert timing.LEAST_REPEATS <= found.repeats <= 25
    assert timing.time_calls([int], CPU, repeats=1000, limit_s=0).repeats == timing.LEAST_REPEATS


def test_standard_operators_compute_what_their_names_say():
    ops = invariant_ops.standard()
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(64, generator=torch.Generator().manual_seed(2))
    matrix = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    scale = (x.double().square().mean(-1, keepdim=True) + invariant_ops.EPSILON).rsqrt()
    expected = {
        "mean": x.double().mean(-1),
        "rmsnorm": x.double() * scale * weight.double(),
        "softmax": x.double().exp() / x.double().exp().sum(-1, keepdim=True),
        "matmul": x.double() @ matrix.double().T,
    }
    assert ops.keys() == expected.keys()
    weights = {"rmsnorm": weight, "matmul": matrix}
    for name, right in expected.items():
        torch.testing.assert_close(
            ops[name](x, weights.get(name)).double(), right, rtol=0, atol=1e-4
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels can run here")
def test_without_a_gpu_the_batch_invariant_operators_say_why():
    assert "CUDA" in invariant_ops.unavailable()
    with pytest.raises(RuntimeError, match="no CUDA device"):
        invariant_ops.batch_invariant()


def test_weights_take_turns_in_the_pool():
    bench = Bench(CPU, torch.bfloat16, 64 * 64)
    small = bench._weights(Point("matmul", 4, 16, 32))
    assert len(small) == 8 and {w.shape for w in small} == {(16, 32)}
    assert len({w.data_ptr() for w in small}) == 8
    whole = bench._weights(Point("matmul", 4, 64, 64))
    assert len(whole) == operator_bench.LEAST_CALLS and len({w.data_ptr() for w in whole}) == 1


def test_a_tiny_grid_is_measured_and_written(tmp_path, capsys):
    out = tmp_path / "operators.json"
    flags = ("--rows=1,4", "--sizes=32,64", "--columns=64", "--repeats=6", "--matmul-rows=4")
    assert operators.run(parse(f"--out={out}", *flags)) == 0
    given = json.loads(out.read_text())
    assert given["format"] == "corun-bench-operators/1"
    assert given["versions"]["vllm"] and given["hardware"]["device"] and given["date"]
    assert not list(tmp_path.glob("*.tmp"))
    measured = given["operators"]
    assert {(m["operator"], m["rows"], m["n"], m["k"]) for m in measured} == {
        (p.operator, p.rows, p.n, p.k) for p in grid((1, 4), 64, (32, 64), 4)
    }
    assert all(0 < m["standard_us"] < 1e6 and m["repeats"] == 6 for m in measured)
    assert given["skipped"] == []
    if not torch.cuda.is_available():
        assert {m["batch_invariant_us"] for m in measured} == {None}
        assert "CUDA" in given["notes"][0]
    print(f"measured {len(measured)} shapes; {capsys.readouterr().out}")


def test_what_does_not_fit_the_time_is_listed():
    bench = Bench(CPU, torch.float32, 64 * 64)
    points = [Point("mean", rows, 64) for rows in range(1, 40)]
    slow = bench.standard["mean"]
    bench.standard["mean"] = lambda x, w: (time.sleep(0.01), slow(x, w))
    measured, skipped = measure_all(bench, points, repeats=5, seconds=0.3)
    assert [m.point for m in measured] + skipped == points
    assert 0 < len(measured) < 39 and skipped


@pytest.mark.parametrize("flags", [("--seconds=0",), ("--columns=0",), ("--repeats=-1",)])
def test_bad_numbers_are_refused(tmp_path, flags):
    with pytest.raises(ValueError, match="more than 0"):
        operators.run(parse(f"--out={tmp_path / 'x'}", *flags))
    assert not list(tmp_path.iterdir())


def test_the_parser_imports_neither_torch_nor_vllm():
    code = (
        "import argparse, sys\n"
        "from corun.bench import operators, server, step_times\n"
        "for part in (operators, server, step_times):\n"
        "    part.add_arguments(argparse.ArgumentParser())\n"
        "print([name for name in ('torch', 'vllm') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_sizes_are_counts(capsys):
    for text in ("1,x", "0", ""):
        with pytest.raises(SystemExit):
            parse("--out=x", f"--rows={text}")
    assert "--rows" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batch_invariant_operators_compute_the_same():
    standard, invariant = invariant_ops.standard(), invariant_ops.batch_invariant()
    x = torch.randn(6, 256, dtype=torch.bfloat16, device="cuda")
    weights = {
        "rmsnorm": torch.rand(256, dtype=torch.bfloat16, device="cuda"),
        "matmul": torch.randn(128, 256, dtype=torch.bfloat16, device="cuda") / 16,
    }
    for name, operator in invariant.items():
        found, right = (f(x, weights.get(name)).float() for f in (operator, standard[name]))
        torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)
