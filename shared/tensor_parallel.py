"""A target whose layers are split over the ranks of a launcher: they act as one.

Rank 0 decides everything and announces each forward pass; the others follow it. What a rank raises
ends the launcher. The announcements go over gloo, the sums inside the layers over the device's own
backend.
"""

from typing import Any

from shared.errors import TargetError


def announce(input_ids: Any, arguments: tuple[Any, ...]) -> None:
    """Rank 0, before a forward pass: lets the others run the same one. Others: nothing."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.broadcast_object_list([(input_ids.cpu(), arguments)])


def release() -> None:
    """Rank 0, when it is done: ends `follow` on the others."""
    import torch.distributed as dist

    dist.broadcast_object_list([None])


def follow(target: Any) -> None:
    """The other ranks: run what rank 0 announces, until it is done.

    Raises:
        TargetError: this rank's device is out of memory. Rank 0 can't go on with less: it waits for
            this rank's part inside the forward pass, so the launcher has to end all.
    """
    import signal
    import threading

    import torch.distributed as dist

    from shared.capture import capture, out_of_memory

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 hears it and finishes its shard
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box)
        if box[0] is None:
            return
        input_ids, arguments = box[0]
        try:
            capture(target, input_ids.to(target.device), *arguments)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            size = input_ids.numel()
            raise TargetError(
                f"out of memory with {size} tokens on rank {dist.get_rank()} of a target that "
                "ranks share",
                where=str(target.device),
                do=f"Give the same command with batch_tokens={size // 2}; committed shards stay",
            ) from None
