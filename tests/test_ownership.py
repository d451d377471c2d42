"""Muon's work shared by ranks: balance, order, and the same parameters whatever their number."""

import multiprocessing
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_muon import Mixed, config

from stage2_train import muon, ownership
from stage2_train.optimizers import build_optimizer


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 7))
def test_assignment_covers_every_item_and_is_balanced(costs, world):
    owners = ownership.assign(costs, world)
    assert ownership.assign(costs, world) == owners
    load = [0] * world
    for owner, cost in zip(owners, costs, strict=True):
        load[owner] += cost
    assert max(load) <= sum(costs) / world + max(costs, default=0)
    turns = ownership.rounds(owners, world)
    assert sorted(item for turn in turns for _, item in turn) == list(range(len(costs)))
    assert all(len({owner for owner, _ in turn}) == len(turn) for turn in turns)


def train_three_updates(world: int = 1):
    """Parameters after three Muon updates of the tiny model."""
    model = Mixed()
    optimizer = build_optimizer(config(), model.named_parameters(), model.parts())
    assert optimizer.inner[0].world == world
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(12, 32, generator=generator)).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Threads:
    """A process group of threads: each has a rank, and `receive` meets the others."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier = world, threading.Barrier(world, timeout=60)
        self.local, self.sent, self.calls = threading.local(), {}, 0

    def here(self):
        return self.local.rank, self.world

    def receive(self, result, owner) -> None:
        if self.local.rank == owner:
            self.sent[owner] = result.clone()
            self.calls += 1
        self.barrier.wait()
        result.copy_(self.sent[owner])
        self.barrier.wait()

    def run(self, rank):
        self.local.rank = rank
        return train_three_updates(self.world)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_trap_33_ranks_that_share_the_work_get_the_same_parameters(world, monkeypatch):
    monkeypatch.setitem(muon.CHUNK_ELEMENTS, "cpu", 2000)  # chunks of uneven sizes
    monkeypatch.setattr(Mixed, "__init__", _seeded(Mixed.__init__))
    alone = train_three_updates()
    group = Threads(world)
    monkeypatch.setattr(ownership, "here", group.here)
    monkeypatch.setattr(ownership, "receive", group.receive)
    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(group.run, range(world)))
    for parameters in found:
        for name, value in parameters.items():
            assert torch.equal(value, alone[name]), name
    # one exchange a chunk: four heads of q, gate and up, each in chunks of at most 2000 entries
    assert group.calls == 3 * (2 + 2)


def _seeded(make):
    """The global generator is shared by threads: one at a time."""
    lock = threading.Lock()

    def init(self):
        with lock:
            make(self)

    return init


def _rank(rank: int, port: int, results) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    muon.CHUNK_ELEMENTS["cpu"] = 2000
    done = {name: value.numpy() for name, value in train_three_updates(2).items()}
    results.put((rank, done))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_parameters_of_one(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    monkeypatch.setitem(muon.CHUNK_ELEMENTS, "cpu", 2000)
    alone = train_three_updates()
    for _ in ranks:
        rank, parameters = results.get(timeout=240)
        for name, value in parameters.items():
            assert (value == alone[name].numpy()).all(), (rank, name)
    for process in ranks:
        process.join()
