import pytest

pytest.importorskip("vllm")
from plans import isolate
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from corun.engine import padding
from corun.engine.runner_state import RunnerState


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
