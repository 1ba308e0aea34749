"""The tap on a fake runner, the search for the first difference, and localize's options."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from corun.config import CoRunConfig
from corun.verify.localize import JOINED, MODULE, NOTHING, Finding, LocalizeOptions, LocalizeReport
from corun.verify.trace_diff import TraceDiff, first_difference, unequal

pytest.importorskip("vllm")
from corun.engine.tap import Output, Tap, TappedStep

# A loaded machine is slow, not wrong.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HIDDEN, VOCABULARY = 4, 7


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.pair = Pair()
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden):
        a, _ = self.pair(self.up(hidden))
        return self.down(a)


class Pair(nn.Module):
    def forward(self, x):
        return x + 1, x * 2


class Runner:
    """The parts of a V1 runner that the tap reads; V2 gets them from prepare_inputs."""

    def __init__(self, model):
        self.model = model
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(4, int))
        self.query_start_loc = SimpleNamespace(np=np.zeros(5, int))

    def get_model(self):
        return self.model

    def prepare_inputs(self, batch):
        return batch


class Worker:
    def __init__(self, model, v2):
        self.model_runner, self.use_v2_model_runner = Runner(model), v2

    def execute_model(self, step):
        """step: {request id: (computed tokens, hidden rows)}, padded to 8 rows."""
        runner = self.model_runner
        bounds = np.cumsum([0, *(len(rows) for _, rows in step.values())])
        computed = np.array([done for done, _ in step.values()])
        if self.use_v2_model_runner:
            batch = SimpleNamespace(
                req_ids=list(step), query_start_loc_np=bounds, num_computed_tokens_np=computed
            )
            runner.prepare_inputs(batch)
        else:
            runner.input_batch.req_ids = list(step)
            runner.query_start_loc.np[: len(bounds)] = bounds
            runner.input_batch.num_computed_tokens_cpu[: len(computed)] = computed
        hidden = torch.cat([rows for _, rows in step.values()])
        return runner.model(torch.cat([hidden, torch.zeros(8 - len(hidden), HIDDEN)]))


@pytest.mark.parametrize("v2", [False, True])
def test_the_tap_keeps_the_requests_own_rows(v2):
    torch.manual_seed(0)
    model = Model()
    worker, tap = Worker(model, v2), Tap()
    tap.attach(worker)
    tap.watch("b")
    mine, others = torch.randn(3, HIDDEN), torch.randn(2, HIDDEN)
    worker.execute_model({"a": (0, others)})  # without the request
    whole = worker.execute_model({"a": (2, others), "b": (5, mine)})
    assert len(tap.steps) == 1
    step = tap.steps[0]
    assert (step.position, step.tokens, step.requests, step.batch_tokens) == (5, 3, 2, 5)
    assert [(o.module, o.kind) for o in step.outputs] == [
        ("up", "Linear"),
        ("pair", "Pair"),
        ("down", "Linear"),
        ("Model", "Model"),
    ]
    assert torch.equal(step.outputs[-1].rows[0], whole[2:5])
    assert step.outputs[0].shapes == ((8, 2 * HIDDEN),)
    assert len(step.outputs[1].rows) == 2
    tap.detach()
    worker.execute_model({"b": (8, mine)})
    assert len(tap.steps) == 1
    assert "execute_model" not in vars(worker)


def test_an_unknown_runner_is_refused():
    worker = SimpleNamespace(model_runner=SimpleNamespace(), use_v2_model_runner=False)
    with pytest.raises(RuntimeError, match="rows apart"):
        Tap().attach(worker)


def trace(rows, chunks, modules=3):
    """A tap's steps over `rows` [tokens, width], cut at `chunks`; module m multiplies by m + 1."""
    steps, position = [], 0
    for size in chunks:
        step = TappedStep(position, size, 1, size)
        part = rows[position : position + size]
        for m in range(modules):
            out = part * (m + 1)
            shape = (size + 2, rows.shape[1])
            step.outputs.append(Output(f"m{m}", "Linear", 0, position, (shape,), (out.clone(),)))
        steps.append(step)
        position += size
    return steps


ROWS = torch.arange(24, dtype=torch.float32).reshape(6, 4) + 0.5


@PATIENT
@given(
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 31),
    st.tuples(*[st.sampled_from([(6,), (4, 1, 1), (2, 2, 2), (1, 5)])] * 2),
)
def test_any_changed_bit_is_found_in_execution_order(position, module, column, bit, chunks):
    alone, crowd = (trace(ROWS, cut) for cut in chunks)
    for step in crowd:
        if step.position <= position < step.position + step.tokens:
            tensor = step.outputs[module].rows[0]
            view = tensor.view(torch.int32)
            mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            view[position - step.position, column] ^= mask
    diff = first_difference(alone, crowd, agreed=6, prompt_tokens=4)
    first = diff.first
    assert (first.module, first.position) == (f"m{module}", position)
    assert first.phase == ("prefill" if position < 4 else "decode")
    assert first.differing == 1
    assert first.share == 1 / first.elements
    assert first.crowd_shape[1] == 4
    # Tokens from `agreed` on had other inputs, and are not compared.
    assert first_difference(alone, crowd, agreed=position, prompt_tokens=4).first is None


@pytest.mark.parametrize("chunks", [(6,), (1, 1, 4), (5, 1)])
def test_equal_traces_count_everything_whatever_their_chunks(chunks):
    diff = first_difference(trace(ROWS, (6,)), trace(ROWS, chunks), 6, 4)
    assert diff == TraceDiff(None, 3 * 24, 3 * len(chunks), len(chunks))


def test_bits_are_compared_not_values():
    a = torch.tensor([0.0, float("nan"), 1.0])
    b = torch.tensor([-0.0, float("nan"), 1.0])
    assert unequal(a, b).tolist() == [True, False, False]
    half = a.to(torch.bfloat16)
    assert not unequal(half, half).any()


def test_outputs_of_other_shapes_are_an_error():
    crowd = trace(ROWS, (6,))
    crowd[0].outputs[0].rows[0].resize_(6, 3)
    with pytest.raises(RuntimeError, match="beside others"):
        first_difference(trace(ROWS, (6,)), crowd, 6, 4)


def test_options_and_exit_statuses():
    for wrong in (
        {"rows": 1},
        {"max_tokens": 0},
        {"requests": 0},
        {"engine_args": {"enforce_eager": False}},
        {"engine_args": {"tensor_parallel_size": 2}},
    ):
        with pytest.raises(ValueError):
            LocalizeOptions("m", **wrong)
    assert LocalizeOptions("m").config == CoRunConfig(policy="off")
    report = LocalizeReport("m", "off")
    assert report.exit_status == 2  # nothing was compared
    same = first_difference(trace(ROWS, (6,)), trace(ROWS, (6,)), 6, 4)
    report.findings.append(Finding(JOINED, NOTHING, "r", same, 1, same.elements))
    assert report.exit_status == 0
    report.findings.append(Finding(JOINED, MODULE, "r", same, 1, same.elements))
    assert report.exit_status == 1
