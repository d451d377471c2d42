"""Codecs: exact where they promise it, bounded where they don't, readable by stock zarr."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from store_tools import SPEC, fill, samples, states

from shared.codec import NAMES, get_codec
from shared.errors import CorruptionError, DataError
from shared.quantize import (
    channel_exponents,
    dequantise,
    dequantise_numpy,
    exp2_quarter,
    rotate,
    scaled_groups,
    to_bits,
    to_float,
)
from shared.spec import CaptureSpec

LOSSY = [name for name in NAMES if get_codec(name).lossy]
WIDE = CaptureSpec("w", "Wide", (0, 1), 256)


def decoded(name: str, x_RLD: np.ndarray, rows: int | None = None) -> np.ndarray:
    codec = get_codec(name)
    out_RLD = np.empty_like(x_RLD[:rows])
    codec.decode(np.frombuffer(codec.encode(x_RLD, 64), np.uint8), out_RLD, 64)
    return out_RLD


@pytest.mark.parametrize("name", ["lossless", "fast"])
@settings(max_examples=30, deadline=None)
@given(x_RLD=hnp.arrays(np.uint16, st.tuples(st.integers(1, 64), st.just(2), st.integers(1, 40))))
def test_lossless_codecs_return_every_bit(name, x_RLD):
    assert np.array_equal(decoded(name, x_RLD), x_RLD)


# Relative L2 error and bits a value of channel-scaled normal values, with some room.
BOUNDS = {
    "int8": (0.0085, 8.6), "bits5": (0.0075, 11.5), "bits4": (0.0145, 10.5),
    "bits3": (0.0285, 9.5), "int4": (0.12, 5.0),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("rows", [1, 63, 64])
def test_lossy_codecs_stay_within_their_error_and_size(name, rows):
    x_RLD = states(rows, WIDE)
    y_RLD = decoded(name, x_RLD)
    true, got = to_float(x_RLD), to_float(y_RLD)
    error = np.linalg.norm(got - true) / np.linalg.norm(true)
    assert error < BOUNDS[name][0] * (1.5 if rows == 1 else 1)
    if rows == 64:
        assert len(get_codec(name).encode(x_RLD, 64)) * 8 / x_RLD.size < BOUNDS[name][1]
    assert np.array_equal(decoded(name, x_RLD, rows=rows // 2 + 1), y_RLD[: rows // 2 + 1])


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_at_the_edges_of_bf16(name):
    x = np.zeros((3, 2, 100), np.float32)
    x[0], x[1, 0, ::2], x[1, 1], x[2, 0, 5] = 3.38e38, -3.38e38, 1e-40, 7e4
    got = to_float(decoded(name, to_bits(x)))
    assert np.isfinite(got).all()
    assert np.allclose(got[0], x[0], rtol=0.3)
    zeros = np.zeros((5, 2, 64), np.uint16)
    assert not to_float(decoded(name, zeros)).any()
    for bad in (0x7F80, 0xFF80, 0x7FC0):
        zeros[3, 1, 7] = bad
        with pytest.raises(DataError, match="finite"):
            get_codec(name).encode(zeros, 64)


@pytest.mark.parametrize("bits", [5, 4, 3])
def test_rounded_mantissas_are_the_nearest(bits):
    every = np.arange(0x0080, 0x7F80, dtype=np.uint16)  # all positive normal values
    got = to_float(decoded(f"bits{bits}", every[: 64 * 500].reshape(64, 1, -1))).reshape(-1)
    true = to_float(every[: got.size])
    step = 2.0 ** (np.floor(np.log2(true.astype(np.float64))) - bits)
    assert (np.abs(got.astype(np.float64) - true) <= step / 2).all()
    kept = decoded(f"bits{bits}", every[: 64 * 500].reshape(64, 1, -1))
    assert not (kept & ((1 << (7 - bits)) - 1)).any()


def test_fast_dequantisation_equals_its_twin():
    rng = np.random.default_rng(0)
    x_RLD = to_float(states(64, CaptureSpec("w", "Wide", (0, 1, 2), 640)))
    k_LD = channel_exponents(x_RLD)
    y, scale_RLG = scaled_groups(x_RLD / exp2_quarter(k_LD), 64, 127)
    q_RLD = np.rint(y).astype(np.int8).reshape(64, 3, 640)
    q_RLD = np.where(rng.random(q_RLD.shape) < 0.1, 0, q_RLD).astype(np.int8)
    fast, slow = np.full(q_RLD.shape, 0xFFFF, np.uint16), np.empty(q_RLD.shape, np.uint16)
    dequantise(q_RLD, exp2_quarter(k_LD), scale_RLG, 64, fast)
    dequantise_numpy(q_RLD, exp2_quarter(k_LD), scale_RLG, 64, slow)
    assert np.array_equal(fast, slow)


def test_the_rotation_is_its_own_inverse():
    y = np.random.default_rng(0).standard_normal((3, 2, 128)).astype(np.float32)
    assert np.allclose(rotate(rotate(y, 64), 64), y, atol=1e-5)
    assert np.allclose(np.linalg.norm(rotate(y, 64)), np.linalg.norm(y), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_chunks_raise_or_decode_but_never_crash(name, data):
    codec = get_codec(name)
    whole = bytearray(codec.encode(states(9), 64))
    place = data.draw(st.integers(0, min(len(whole) - 1, 64)))
    whole[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(whole)))
    out_RLD = np.empty((9, 3, 96), np.uint16)
    for damaged in (whole, whole[:cut]):
        try:
            codec.decode(np.frombuffer(bytes(damaged), np.uint8), out_RLD, 64)
        except CorruptionError:
            continue


@pytest.mark.parametrize("codec", NAMES)
def test_every_codec_in_both_containers_and_in_stock_zarr(tmp_path, codec):
    import zarr

    import shared.zarr_codecs  # noqa: F401  (the entry point does this in an installed package)

    store, truth = fill(tmp_path / "c", [[70, 5]], codec=codec)
    (name,) = store.shard_ids()
    group = zarr.open_group(tmp_path / "c" / "shards" / name, mode="r")
    first = {sample: store.reader().read(sample)[1] for sample in truth}
    columns = [group.attrs[key] for key in ("ids", "start", "num_tokens")]
    for sample, start, size in zip(*columns, strict=True):
        assert np.array_equal(group["hidden"][start : start + size], first[sample])
    errors = store.shard(name).layer_error
    assert len(errors) == (SPEC.num_states if get_codec(codec).lossy else 0)
    store.convert("webdataset")
    for sample in truth:
        assert np.array_equal(store.reader().read(sample)[1], first[sample])
    assert store.shard(name).layer_error == errors
    assert store.verify().ok


def test_a_lossy_codec_refuses_a_nan_and_leaves_nothing(tmp_path):
    store, _ = fill(tmp_path / "c", [[3]])
    (chosen,) = samples([10], seed=4)
    hidden_TLD = states(10)
    hidden_TLD[4, 1, 7] = 0x7FC0
    writer = store.write_shard([chosen], "int8", "zarr")
    with pytest.raises(DataError, match="finite"), writer:
        writer.append(chosen[0], hidden_TLD)
    assert len(store.shard_ids()) == 1
