"""Muon's work shared by ranks: balance, order, and the same parameters whatever their number."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_muon import Mixed, config, make
from torch import is_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stage2_train import muon, ownership
from stage2_train.muon_chunks import placed, plan_chunks
from stage2_train.optimizers import build_optimizer
from stage2_train.param_rules import by_head, interleaved, resolve, whole


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 7))
def test_assignment_covers_every_item_and_is_balanced(costs, world):
    owners = ownership.assign(costs, world)
    assert ownership.assign(costs, world) == owners
    load = [0] * world
    for owner, cost in zip(owners, costs, strict=True):
        load[owner] += cost
    assert max(load) <= sum(costs) / world + max(costs, default=0)
    turns = ownership.rounds(owners, world)
    assert sorted(item for turn in turns for item in turn.values()) == list(range(len(costs)))
    assert all(owners[item] == rank for turn in turns for rank, item in turn.items())


def test_bound_items_stay_and_free_ones_level_the_load():
    bound = [[0], [0], None, None, [1]]
    assert ownership.assign([5, 1, 4, 3, 3], 2, bound) == [0, 0, 1, 0, 1]


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 2, 0]))
def test_every_row_is_held_by_one_shard_of_its_chunk(shards, heads, rows, group):
    """Uneven and empty shards, stacked and row-interleaved storage."""
    shapes = [(heads * 3, 8), (2 * rows, 8)]
    declared = [by_head("q", heads, 3), interleaved(["a", "b"], rows)]
    matrices = [
        (i, shape, resolve("w", parts, shape[0]))
        for i, (shape, parts) in enumerate(zip(shapes, declared, strict=True))
    ]
    covered = [torch.zeros(shape) for shape in shapes]
    for chunk in plan_chunks(matrices, group, 200, shards):
        stage = torch.zeros(chunk.shape)
        for shard in range(shards):
            flat = torch.ones(chunk.count(shard))
            for _, run, part in placed([chunk], shard, flat):
                low, high = ownership.edges(shapes[run.index][0], shards)[shard]
                run.of(covered[run.index][low:high], low).add_(part)
                run.at(stage).add_(part)
            assert chunk.home in (None, shard) or not len(flat)
        assert torch.equal(stage, torch.ones_like(stage))
    assert all(torch.equal(c, torch.ones_like(c)) for c in covered)


def train_three_updates(world: int = 1):
    """Parameters after three Muon updates of the tiny model."""
    model = Mixed()
    optimizer = build_optimizer(config(), model.named_parameters(), model.parts())
    assert optimizer.inner[0].grid.world == world
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(12, 32, generator=generator)).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Threads:
    """Ranks that are threads: `copy` meets the others."""

    def __init__(self, world: int) -> None:
        self.world, self.barrier = world, threading.Barrier(world, timeout=60)
        self.local, self.sent, self.calls = threading.local(), {}, 0

    def of(self, _):
        group, grid = self, ownership.Grid(replica=self.local.rank, replicas=self.world)

        class Fake(ownership.Grid):
            def copy(self, flat, replica):
                group.copy(flat, replica)

        return Fake(**vars(grid))

    def copy(self, flat, replica) -> None:
        if self.local.rank == replica:
            self.sent[replica] = flat.clone()
            self.calls += 1
        self.barrier.wait()
        flat.copy_(self.sent[replica])
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
    monkeypatch.setattr(muon.ownership.Grid, "of", group.of)
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


class Peak(TorchDispatchMode):
    """Most bytes of tensors made inside that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in filter(is_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def test_memory_beyond_the_momentum_is_two_copies_of_a_chunk():
    """And a chunk is bounded: at most the largest bucket, here half of it."""
    rows, cols, count = 64, 256, 8
    parameters = [torch.nn.Parameter(torch.randn(rows, cols)) for _ in range(count)]
    optimizer = make(parameters, [whole("w")] * count)
    for parameter in parameters:
        parameter.grad = torch.randn(rows, cols)
    with pytest.MonkeyPatch.context() as patch, Peak() as peak:
        patch.setitem(muon.CHUNK_ELEMENTS, "cpu", rows * cols * count // 2)
        optimizer.step(checked=True)
    bucket = rows * cols * count * 4
    scratch = 4 * rows * rows * (count // 2) * 4  # n x n matrices of the parts in one call
    assert bucket / 2 < peak.most <= 2 * bucket / 2 + scratch
    assert peak.most <= 2 * bucket
