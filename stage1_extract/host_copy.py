"""States from the device to the host without stopping the device.

On CUDA a side stream copies into pinned buffers that are reused; the next forward pass runs
meanwhile, and the writing thread waits for the copy's event. On CPU the states are already there.

B: samples; T: tokens; L: states; D: channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class HostBatch:
    """A batch on its way to the host.

    Args:
        rows: which samples of the planned batch these are.
        shape: B, T, L, D; packed samples are one row.
    """

    rows: list[int]
    shape: tuple[int, ...]
    flat: Any
    event: Any = None
    pool: "HostCopies | None" = None

    def wait(self) -> np.ndarray:
        """uint16 [B, T, L, D], once the copy has arrived."""
        if self.event is not None:
            self.event.synchronize()
        values = self.flat[: math.prod(self.shape)].numpy().view(np.uint16)
        return values.reshape(self.shape)

    def samples(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """uint16 [T, L, D] of each sample, without pads; of one row, cut one after another."""
        hidden_BTLD = self.wait()
        if len(hidden_BTLD) == 1:
            ends = np.cumsum(lengths)
            return [hidden_BTLD[0, e - n : e] for e, n in zip(ends, lengths, strict=True)]
        return [row[:length] for row, length in zip(hidden_BTLD, lengths, strict=True)]

    def release(self) -> None:
        """Gives the buffer back; arrays of it must not be used any more."""
        if self.pool is not None:
            self.pool.buffers.append(self.flat)
        self.flat = None


@dataclass
class HostCopies:
    """Makes HostBatches of one device's states; as many buffers as batches are in flight.

    Args:
        buffers: free ones; the writing thread gives them back.
        largest: values of the largest batch so far.
    """

    device: Any
    buffers: list[Any] = field(default_factory=list)
    stream: Any = None
    largest: int = 0

    def start(self, hidden_BTLD: Any, rows: list[int]) -> HostBatch:
        """Begins the copy of bfloat16 [B, T, L, D] on the device."""
        import torch

        bits, shape = hidden_BTLD.view(torch.int16), tuple(hidden_BTLD.shape)
        if hidden_BTLD.device.type != "cuda":
            return HostBatch(rows, shape, bits.cpu().reshape(-1))
        if self.stream is None:
            self.stream = torch.cuda.Stream(hidden_BTLD.device)
        count = bits.numel()
        flat = self.take(count)
        self.stream.wait_stream(torch.cuda.current_stream(hidden_BTLD.device))
        with torch.cuda.stream(self.stream):
            flat[:count].copy_(bits.reshape(-1), non_blocking=True)
            event = self.stream.record_event()
        hidden_BTLD.record_stream(self.stream)
        return HostBatch(rows, shape, flat, event, self)

    def take(self, count: int) -> Any:
        """A buffer of `count` values or more; free ones that are too small make room for it."""
        import torch

        self.largest = max(self.largest, count)
        while self.buffers:
            flat = self.buffers.pop()
            if flat.numel() >= count:
                return flat
        pin = torch.cuda.is_available()
        return torch.empty(self.largest, dtype=torch.int16, pin_memory=pin)
