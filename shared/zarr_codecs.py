"""The lossy codecs as zarr codecs: with drafttape installed, stock zarr reads such arrays.

They are found by entry point (`zarr.codecs` in pyproject.toml) and registered when imported.
C: rows of a full chunk; L: states; D: channels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from zarr.abc.codec import ArrayBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, NDBuffer
from zarr.registry import register_codec

from shared.codec import FILL, Codec
from shared.quantize import Int4Codec, Int8Codec


class _ChunkCodec(ArrayBytesCodec):
    """Bytes of one chunk [C, L, D] by a codec of ours; rows of fill at its end are not stored."""

    is_fixed_size = False
    codec_name: ClassVar[str]

    def _codec(self) -> Codec:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        (entry,) = self._codec().zarr_codecs()
        return entry

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(**data.get("configuration", {}))

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError("the size depends on the data")

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        data = chunk_data.as_numpy_array()
        out_CLD = np.full(chunk_spec.shape, FILL, np.uint16)
        rows = int.from_bytes(data[4:8].tobytes(), "little")
        self._codec().decode(data, out_CLD[:rows], chunk_spec.shape[0])
        return chunk_spec.prototype.nd_buffer.from_numpy_array(out_CLD)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        block_CLD = chunk_data.as_numpy_array()
        real = np.flatnonzero((block_CLD != FILL).any((1, 2)))
        rows = int(real[-1]) + 1 if len(real) else 0
        data = self._codec().encode(block_CLD[:rows], chunk_spec.shape[0])
        return chunk_spec.prototype.buffer.from_bytes(data)


@dataclass(frozen=True)
class Int8(_ChunkCodec):
    """Int8Codec in zarr."""

    codec_name: ClassVar[str] = "drafttape.int8"
    group: int = 64

    def _codec(self) -> Codec:
        return Int8Codec(group=self.group)


@dataclass(frozen=True)
class Int4(_ChunkCodec):
    """Int4Codec in zarr."""

    codec_name: ClassVar[str] = "drafttape.int4"
    group: int = 32
    rotation: int = 64

    def _codec(self) -> Codec:
        return Int4Codec(group=self.group, rotation=self.rotation)


register_codec(Int8.codec_name, Int8)
register_codec(Int4.codec_name, Int4)
