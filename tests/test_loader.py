"""The plan of steps and the feeding of batches."""

import signal
from collections import Counter

import numpy as np
import pytest
import torch
from fakes import Reader, make_data, make_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, CorruptionError, DataError, DrafttapeError, TrainingError
from stage2_train import noise
from stage2_train.config import (
    BatchConfig,
    DrafterConfig,
    LoaderConfig,
    LongDocuments,
    TrainConfig,
)
from stage2_train.feed import Feed
from stage2_train.loader import Loader, heldout_batches, open_feed
from stage2_train.steps import StepPlan, chain, pack, pack_balanced

BLOCK = 4


def _plan(snapshot, tokens_per_row=40, rows_per_step=2, anchors=5, seed=0):
    batch = BatchConfig(
        tokens_per_row=tokens_per_row, rows_per_step=rows_per_step, anchors_per_sample=anchors
    )
    return StepPlan(snapshot, batch, seed=seed, block=BLOCK)


def _loader(plan, reader, workers=0, mask_token_id=99, ram=False):
    config = LoaderConfig(workers=workers, prefetch=2, ram=ram)
    feed = open_feed(plan, reader, num_states=2, hidden_size=4, config=config)
    return Loader(plan, feed, mask_token_id=mask_token_id)


def _rows(plan, steps, rank=0, world=1):
    return [row for step in range(steps) for row in plan.step(step)[rank::world]]


def _take(loader, rows):
    """Copies: the loader's buffers are reused."""
    return [
        (row.number, batch.sample_ids, batch.hidden_TLD.clone(), batch.digest(BLOCK))
        for row, batch in loader.batches(rows)
    ]


def _same(left, right):
    assert [item[:2] for item in left] == [item[:2] for item in right]
    assert [item[3] for item in left] == [item[3] for item in right]
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a[2].view(torch.int16), b[2].view(torch.int16))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 60))
def test_packing_against_the_naive_loop(lengths, most):
    order = np.random.default_rng(len(lengths)).permutation(len(lengths))
    rows, row, used = [], [], 0
    for index in order.tolist():
        if used + lengths[index] > most:
            rows.append(row)
            row, used = [], 0
        row.append(index)
        used += lengths[index]
    rows.append(row)
    packed = [part.tolist() for part in pack(order, np.array(lengths), most)]
    assert packed == rows


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 40), st.integers(30, 90), st.integers(1, 5), st.integers(1, 4))
def test_trap_19_20_an_epoch_is_the_split_once_on_any_number_of_ranks(
    count, most, rows_per_step, world
):
    snapshot, _ = make_data(count=count, seed=count, heldout=count // 4)
    plan = _plan(snapshot, most, rows_per_step)
    train = set(snapshot.indices("train").tolist())
    for epochs in (1, 3):
        steps = plan.total_steps(steps=None, epochs=epochs)
        total = plan.total_rows(epochs)
        rows = [row for step in range(steps) for row in plan.step(step, total)]
        seen = Counter(index for row in rows for index in row.samples)
        assert seen == Counter(dict.fromkeys(train, epochs))
        assert [row.number for row in rows] == list(range(total))
        for row in rows:
            assert sum(snapshot.num_tokens[list(row.samples)]) <= most
        # Every rank has every step, whatever it finds in it.
        shares = [[plan.step(step, total)[r::world] for step in range(steps)] for r in range(world)]
        assert {len(share) for share in shares} == {steps}
        union = sorted(row.number for share in shares for part in share for row in part)
        assert union == list(range(total))


def test_trap_19_the_second_epoch_has_another_order():
    plan = _plan(make_data(count=30)[0])
    first, second = (np.concatenate(plan.epoch_rows(epoch)).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second


def test_trap_21_a_row_is_known_without_those_before_it():
    snapshot, _ = make_data(count=30)
    straight = [_plan(snapshot).row(number) for number in range(40)]
    for number in (39, 0, 17):
        assert _plan(snapshot).row(number) == straight[number]
    plan = _plan(snapshot)
    assert [plan.row(number) for number in reversed(range(40))] == straight[::-1]


def test_trap_35_exactly_the_planned_steps():
    snapshot, _ = make_data(count=30)
    plan = _plan(snapshot)
    assert plan.total_steps(steps=2, epochs=4) == 2
    with pytest.raises(ConfigError):
        plan.total_steps(steps=0, epochs=4)
    with pytest.raises(ConfigError):
        plan.total_steps(steps=None, epochs=0)


def test_trap_38_no_supervised_element_is_an_error():
    snapshot, samples = make_data(count=6, heldout=0)
    unsupervised = {name: np.zeros(len(sample[0]), bool) for name, sample in samples.items()}
    with pytest.raises(DataError, match="supervised"):
        _plan(make_snapshot(samples, unsupervised))
    snapshot.indices = lambda _: np.zeros(0, np.int64)
    with pytest.raises(DataError, match="no sample in the train split"):
        _plan(snapshot)


def test_a_document_longer_than_a_row_is_refused_with_its_length():
    snapshot, _ = make_data(count=6, heldout=0)
    with pytest.raises(DataError, match="tokens_per_row"):
        _plan(snapshot, tokens_per_row=int(snapshot.num_tokens.max()) - 1)


def test_trap_24_the_denominator_is_that_of_the_batches():
    snapshot, samples = make_data(count=20)
    plan = _plan(snapshot, rows_per_step=3)
    rows = plan.step(0)
    total = sum(
        batch.labels(BLOCK)[1].sum(0) for _, batch in _loader(plan, Reader(samples)).batches(rows)
    )
    assert plan.slot_counts(rows).tolist() == total.tolist()


def test_the_digest_chain_sees_every_choice():
    snapshot, _ = make_data(count=20)
    changes = [{}, {"seed": 41}, {"anchors": 41}, {"rows_per_step": 41}, {"tokens_per_row": 41}]
    starts = {_plan(snapshot, **change).start_digest() for change in changes}
    assert len(starts) == len(changes)
    assert chain(b"a", [b"b", b"c"]) != chain(b"a", [b"c", b"b"])


@pytest.mark.slow
def test_trap_19_20_workers_change_nothing():
    snapshot, samples = make_data(count=20)
    plan = _plan(snapshot)
    rows = _rows(plan, 8)
    with _loader(plan, Reader(samples)) as loader:
        alone = _take(loader, rows)
    assert len(alone) == 16
    for workers in (1, 2):
        with _loader(plan, Reader(samples), workers) as loader:
            _same(alone, _take(loader, rows))
    # Two ranks together are the same rows; fewer rows than slots end as well.
    parts = []
    for rank in range(2):
        with _loader(plan, Reader(samples), 1) as loader:
            parts += _take(loader, _rows(plan, 1, rank, 2))
    _same(alone[:2], sorted(parts, key=lambda item: item[0]))


@pytest.mark.slow
def test_one_worker_gives_the_same_batches_and_ends():
    snapshot, samples = make_data(count=20)
    plan = _plan(snapshot)
    rows = _rows(plan, 4)
    with _loader(plan, Reader(samples)) as loader:
        alone = _take(loader, rows)
    with _loader(plan, Reader(samples), 1) as loader:
        _same(alone, _take(loader, rows))
        processes = loader.feed._processes
    assert all(not process.is_alive() for process in processes)


def test_hidden_states_are_the_stored_bits():
    snapshot, samples = make_data(count=8)
    plan = _plan(snapshot)
    for _, batch in _loader(plan, Reader(samples)).batches(plan.step(0)):
        expected = np.concatenate([samples[name][1] for name in batch.sample_ids])
        assert np.array_equal(batch.hidden_TLD.view(torch.int16).numpy().view(np.uint16), expected)
        tokens = np.concatenate([samples[name][0] for name in batch.sample_ids])
        assert batch.input_ids_T.tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("corrupt", CorruptionError, "shard 7"),
        ("missing", CorruptionError, "no such shard"),
        ("other", CorruptionError, "not those of its id"),
        ("short", CorruptionError, "the snapshot says"),
        ("bug", ZeroDivisionError, "a bug"),
    ],
)
def test_trap_39_nothing_is_skipped(kind, error, says):
    snapshot, samples = make_data(count=12)
    plan = _plan(snapshot)
    bad = snapshot.ids[plan.row(2).samples[0]]
    with pytest.raises(error, match=says) as caught:
        _take(_loader(plan, Reader(samples, bad, kind)), _rows(plan, 4))
    if error is CorruptionError:
        assert bad in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("corrupt", CorruptionError, "shard 7"),
        pytest.param("bug", RuntimeError, "ZeroDivisionError", marks=pytest.mark.slow),
        ("die", TrainingError, "exit code 9"),
    ],
)
def test_trap_39_a_workers_error_arrives_as_it_is(kind, error, says):
    snapshot, samples = make_data(count=12)
    plan = _plan(snapshot)
    bad = snapshot.ids[plan.row(2).samples[0]]
    with (
        _loader(plan, Reader(samples, bad, kind), 2) as loader,
        pytest.raises(error, match=says) as caught,
    ):
        _take(loader, _rows(plan, 4))
    assert isinstance(caught.value, DrafttapeError) == (kind != "bug")


def test_trap_43_the_mask_token_must_not_occur():
    snapshot, samples = make_data(count=12, vocab=5000)
    plan = _plan(snapshot)
    name = snapshot.ids[plan.row(1).samples[-1]]
    token = next(t for t in samples[name][0].tolist() if _only_in(samples, name, t))
    with pytest.raises(DataError, match=name):
        _take(_loader(plan, Reader(samples), mask_token_id=token), _rows(plan, 2))


def _only_in(samples, name, token):
    return not any(token in tokens for other, (tokens, _) in samples.items() if other != name)


def test_a_feed_is_bounded():
    """No more tasks are taken than there are slots."""
    snapshot, samples = make_data(count=12)
    taken = []

    def tasks():
        for number, name in enumerate(snapshot.ids):
            taken.append(number)
            length = len(samples[name][0])
            yield number, ((name, length, 0, length),)

    with Feed(Reader(samples), (40, 2, 4), workers=1, prefetch=3) as feed:
        rows = feed.rows(tasks())
        next(rows)
        assert len(taken) <= 3
        next(rows)
        assert len(taken) <= 4


def test_trap_41_held_out_batches_are_fixed_and_one_document_each():
    snapshot, samples = make_data(count=12)
    batch = BatchConfig(anchors_per_sample=3)  # fewer than there are: they are drawn
    cfg = TrainConfig(drafter=DrafterConfig(block_size=BLOCK), batch=batch)
    digests = []
    for seed in (0, 5):
        cfg.seed = seed
        batches = list(heldout_batches(snapshot, Reader(samples), cfg))
        digests.append([batch.digest(BLOCK) for batch in batches])
        assert all(batch.num_documents == 1 and batch.num_anchors for batch in batches)
    assert digests[0] == digests[1]
    expected = [
        snapshot.ids[index]
        for index in snapshot.indices("heldout")
        if len(noise.candidates(snapshot.mask(index)))
    ]
    assert [batch.sample_ids[0] for batch in batches] == expected


def test_ram_feeds_the_same():
    snapshot, samples = make_data(count=12)
    plan = _plan(snapshot)
    rows = _rows(plan, 3)
    _same(
        _take(_loader(plan, Reader(samples)), rows),
        _take(_loader(plan, Reader(samples), workers=3, ram=True), rows),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 6)), min_size=1, max_size=60),
    st.integers(20, 60),
    st.sampled_from([0, 6, 11]),
    st.integers(1, 8),
)
def test_balanced_packing_keeps_every_document_and_both_limits(sizes, most, anchors, open_rows):
    tokens, blocks = (np.array(column) for column in zip(*sizes, strict=True))
    order = np.random.default_rng(len(sizes)).permutation(len(sizes))
    rows = pack_balanced(order, tokens, blocks, most, anchors, open_rows)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(sizes)))
    for row in rows:
        assert tokens[row].sum() <= most
        assert not anchors or blocks[row].sum() <= anchors
    if open_rows == 1 and not anchors:
        greedy = [row.tolist() for row in pack(order, tokens, most)]
        assert [row.tolist() for row in rows] == greedy


def test_balanced_rows_are_fuller():
    lengths = np.random.default_rng(0).integers(20, 300, 500)
    order = np.random.default_rng(1).permutation(500)
    greedy = len(pack(order, lengths, 576))
    balanced = len(pack_balanced(order, lengths, lengths, 576, 0, 32))
    ideal = lengths.sum() / 576
    assert greedy > 1.15 * ideal
    assert balanced < 1.04 * ideal


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.integers(16, 40), st.integers(2, 5), st.integers(3, 60))
def test_windows_train_every_anchor_once_with_its_whole_block(seed, most, block, anchors):
    snapshot, samples = make_data(count=4, seed=seed, shortest=20, longest=150, heldout=0)
    batch = BatchConfig(
        tokens_per_row=most, anchors_per_sample=anchors, long_documents=LongDocuments.window
    )
    plan = StepPlan(snapshot, batch, seed=seed, block=block)
    found = {index: [] for index in range(4)}
    counts = np.zeros(block - 1, dtype=np.int64)
    loader = _loader(plan, Reader(samples))
    rows = [plan.row(number) for number in range(plan.total_rows(1))]
    for row, packed in loader.batches(rows):
        assert packed.num_tokens <= most
        counts += packed.labels(block)[1].sum(0).numpy()
        start = 0
        for piece, anchor_N in zip(row.pieces, plan.anchors(row), strict=True):
            length = piece.stop - piece.start
            tokens, hidden = samples[snapshot.ids[piece.sample]]
            assert piece.first == 0 or piece.first - piece.start >= most // 2
            found[piece.sample] += (anchor_N + piece.start).tolist()
            part = slice(start, start + length)
            assert packed.input_ids_T[part].tolist() == tokens[piece.start : piece.stop].tolist()
            bits = packed.hidden_TLD[part].view(torch.int16).numpy().view(np.uint16)
            assert np.array_equal(bits, hidden[piece.start : piece.stop])
            assert packed.position_T[part].tolist() == list(range(length))
            start += length
    whole = np.zeros(block - 1, dtype=np.int64)
    for index, name in enumerate(snapshot.ids):
        expected = noise.anchors(seed, 0, name, snapshot.mask(index), anchors, block)
        assert sorted(found[index]) == expected.tolist()
        whole += noise.slot_counts(snapshot.mask(index), expected, block)
    assert counts.tolist() == whole.tolist() == plan.slot_counts(rows).tolist()


def test_a_row_holds_at_most_the_stated_anchors():
    snapshot, samples = make_data(count=30)
    batch = BatchConfig(tokens_per_row=90, anchors_per_sample=5, anchors_per_row=7)
    plan = StepPlan(snapshot, batch, seed=0, block=BLOCK)
    rows = [plan.row(number) for number in range(plan.total_rows(2))]
    most = [packed.num_anchors for _, packed in _loader(plan, Reader(samples)).batches(rows)]
    assert max(most) <= 7
    with pytest.raises(ConfigError, match="anchors_per_row"):
        StepPlan(snapshot, BatchConfig(anchors_per_row=3), seed=0, block=BLOCK)


@pytest.mark.slow
def test_long_tasks_and_long_rows_dont_wait_for_each_other():
    """More than a pipe holds in both directions, and as many rows ahead as are asked for."""
    snapshot, samples = make_data(count=9000, shortest=8, longest=9, heldout=0)
    plan = _plan(snapshot, tokens_per_row=10**5)
    config = LoaderConfig(workers=1, prefetch=4)
    feed = open_feed(plan, Reader(samples), num_states=2, hidden_size=4, config=config)

    def late(*_):
        raise TimeoutError("the reader process and the trainer wait for each other")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        with Loader(plan, feed, mask_token_id=99) as loader:
            count = [batch.num_documents for _, batch in loader.batches(_rows(plan, 3))]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert count == [9000] * 6
