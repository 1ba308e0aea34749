import pytest

pytest.importorskip("vllm")
from plans import certified, isolate
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from corun.engine import padding
from corun.engine.runner_state import RunnerState
from corun.rows import Rows


class V1Runner:
    def __init__(self, mode, rows):
        self.result = (mode, BatchDescriptor(num_tokens=rows), False, None, None)

    def _determine_batch_execution_and_padding(self, num_tokens, num_reqs, **kwargs):
        return self.result


def v1(mode, rows, decode_step):
    runner, state = V1Runner(mode, rows), RunnerState(isolate(8), decode_step=decode_step)
    padding.install_v1(runner, state)
    result = runner._determine_batch_execution_and_padding(num_tokens=3, num_reqs=3)
    mode, descriptor, *rest = result
    assert rest == [False, None, None]
    return mode, descriptor, state


def test_v1_eager_decode_is_padded():
    mode, descriptor, state = v1(CUDAGraphMode.NONE, 3, decode_step=True)
    assert mode == CUDAGraphMode.NONE
    assert descriptor.num_tokens == 8
    assert (state.rows, state.graph) == (8, False)


def test_v1_prefill_is_not_padded():
    _, descriptor, state = v1(CUDAGraphMode.NONE, 3, decode_step=False)
    assert descriptor.num_tokens == 3
    assert state.rows == 3


def test_v1_graph_is_left_alone_and_noted():
    _, descriptor, state = v1(CUDAGraphMode.FULL, 8, decode_step=True)
    assert descriptor.num_tokens == 8
    assert (state.rows, state.graph) == (8, True)
    # A graph of the wrong size is not repaired here: the audit must see it.
    _, descriptor, state = v1(CUDAGraphMode.FULL, 4, decode_step=True)
    assert state.rows == 4


class Manager:
    def __init__(self, mode, rows):
        self.result = BatchExecutionDescriptor(cg_mode=mode, num_tokens=rows, num_reqs=3)

    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras):
        return self.result


@pytest.mark.parametrize(
    ("mode", "rows", "decode_step", "expected", "graph"),
    [
        (CUDAGraphMode.NONE, 3, True, 8, False),
        (CUDAGraphMode.NONE, 3, False, 3, False),
        (CUDAGraphMode.FULL, 8, True, 8, True),
    ],
)
def test_v2(mode, rows, decode_step, expected, graph):
    class Runner:
        cudagraph_manager = Manager(mode, rows)

    state = RunnerState(isolate(8), decode_step=decode_step)
    padding.install_v2(Runner, state)
    descriptor = Runner.cudagraph_manager.dispatch(3, 3, 1, num_active_loras=0)
    assert descriptor.num_tokens == expected
    assert descriptor.num_reqs == 3
    assert (state.rows, state.graph) == (expected, graph)


CLASS = certified(Rows.of([*range(5, 17), 32]), Rows.span(1, 8))


@pytest.mark.parametrize("decode_step", [True, False])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 5), (5, 5), (9, 9), (17, 32), (32, 32)])
def test_certified_steps_are_padded_to_the_class(tokens, rows, decode_step):
    runner = V1Runner(CUDAGraphMode.NONE, tokens)
    state = RunnerState(CLASS, decode_step=decode_step)
    padding.install_v1(runner, state)
    _, descriptor, *_ = runner._determine_batch_execution_and_padding(num_tokens=tokens, num_reqs=1)
    assert descriptor.num_tokens == state.rows == rows

    class Runner:
        cudagraph_manager = Manager(CUDAGraphMode.NONE, tokens)

    state = RunnerState(CLASS, decode_step=decode_step)
    padding.install_v2(Runner, state)
    descriptor = Runner.cudagraph_manager.dispatch(1, tokens, None, num_active_loras=0)
    assert descriptor.num_tokens == state.rows == rows


def test_certified_graphs_are_left_alone_and_noted():
    # 4 rows are not certified: it is for the audit to see.
    for mode, graph in ((CUDAGraphMode.FULL, True), (CUDAGraphMode.PIECEWISE, False)):
        runner, state = V1Runner(mode, 4), RunnerState(CLASS)
        padding.install_v1(runner, state)
        _, descriptor, *_ = runner._determine_batch_execution_and_padding(num_tokens=3, num_reqs=3)
        assert (descriptor.num_tokens, state.rows, state.graph) == (4, 4, graph)


def test_a_certified_step_that_fits_no_count_stops():
    runner = V1Runner(CUDAGraphMode.NONE, 33)
    padding.install_v1(runner, RunnerState(CLASS))
    with pytest.raises(ValueError, match="no certified step shape holds 33 rows"):
        runner._determine_batch_execution_and_padding(num_tokens=33, num_reqs=1)


def test_an_empty_step_is_not_padded():
    runner, state = V1Runner(CUDAGraphMode.NONE, 0), RunnerState(CLASS)
    padding.install_v1(runner, state)
    _, descriptor, *_ = runner._determine_batch_execution_and_padding(num_tokens=0, num_reqs=0)
    assert descriptor.num_tokens == 0
