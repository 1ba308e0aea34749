"""The fixed-order all-reduce, on real process groups (gloo), against a ring-like order."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from corun.engine.collectives import install, sum_in_rank_order

RANKS, ROWS, WIDTH = 3, 8, 4096


class _Communicator:
    def __init__(self, group):
        self.group = group

    def all_gather(self, input_, dim):
        assert dim == 0
        out = [torch.empty_like(input_) for _ in range(RANKS)]
        dist.all_gather(out, input_, group=self.group)
        return torch.cat(out)

    def all_reduce(self, input_):
        out = input_.clone()
        dist.all_reduce(out, group=self.group)
        return out


class _Group:
    world_size = RANKS

    def __init__(self, group):
        self.device_communicator = _Communicator(group)


def _worker(rank, port, queue):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    group = _Group(dist.group.WORLD)
    assert install(group, most_rows=ROWS)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(torch.bfloat16)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(9))
    reduce = group.device_communicator.all_reduce
    straight, shuffled, alone = reduce(x), reduce(x[order]), reduce(x[2:3])
    longer = reduce(torch.cat([x, x]))  # past most_rows: the communicator's own
    if rank == 0:
        equal = torch.equal(straight[order].view(torch.int16), shuffled.view(torch.int16))
        one = torch.equal(straight[2:3].view(torch.int16), alone.view(torch.int16))
        queue.put((equal, one, tuple(longer.shape), straight.float().sum().item()))
    dist.barrier()
    dist.destroy_process_group()


def test_rows_do_not_depend_on_position():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_worker, args=(r, port, queue)) for r in range(RANKS)]
    for w in workers:
        w.start()
    equal, one, longer, total = queue.get(timeout=120)
    for w in workers:
        w.join(60)
    print(f"compared {ROWS * WIDTH + WIDTH} values")
    assert equal and one
    assert longer == (2 * ROWS, WIDTH)
    expected = sum_in_rank_order(
        torch.stack(
            [
                torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(r)).to(
                    torch.bfloat16
                )
                for r in range(RANKS)
            ]
        )
    )
    assert total == expected.float().sum().item()


def test_order_matters_so_it_must_be_fixed():
    x = torch.tensor([[1.0], [2.0**-24], [2.0**-24]])
    assert sum_in_rank_order(x) != sum_in_rank_order(x.flip(0))


def test_one_rank_needs_nothing():
    class One:
        world_size = 1

    assert install(One(), 8) is False
