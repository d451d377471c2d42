"""Whether samples share a forward pass packed end to end or padded to equal lengths.

Packing computes no pads, but it is right only where every layer minds the documents' ends, and fast
only where attention does (a block-diagonal mask costs the square of all tokens). The choice is part
of the cache's spec.
"""

from collections.abc import Sequence

import numpy as np

from shared.config import TargetConfig
from shared.errors import CacheError, ConfigError, TargetError
from shared.log import note
from shared.store import Store
from shared.target import Target, TargetInfo, choose_device, load_target
from shared.target_kernels import attention_backend, gdn_backend, may_be_flash
from stage1_extract.checks import self_test
from stage1_extract.config import Batching, ExtractConfig


def choose_batching(
    cfg: ExtractConfig,
    info: TargetInfo,
    device: str,
    samples: Sequence[np.ndarray],
    loaded: list[Target],
) -> bool:
    """Whether batches are packed.

    `auto` is what the cache holds already; a new cache is packed where attention has kernels for
    it and the self-test passes on this device.

    Args:
        loaded: gets the target if the test had to load it.

    Raises:
        ConfigError: packed is asked for, which nothing proves under these settings.
    """
    if cfg.batching is Batching.padded:
        return False
    if cfg.batching is Batching.packed:
        if not cfg.self_test:
            raise ConfigError(
                "batching=packed is never run unproven", where="self_test", do="Leave it true"
            )
        return True
    try:
        return Store.open(cfg.cache.root).spec.backend.get("batching") == "packed"
    except CacheError:
        pass  # a new cache
    if not is_candidate(info, device) or not cfg.self_test:
        return False
    note(f"loading {info.cfg.name} on {device}")
    loaded.append(load_target(info.cfg, device, info))
    return keeps_apart(loaded[0], samples, last_hidden=cfg.last_hidden)


def is_candidate(info: TargetInfo, device: str) -> bool:
    """Every kind of layer has a kernel that knows where documents end."""
    return _has_kernels(info.backend(device), info.cfg)


def expected_batching(batching: Batching, target: TargetConfig, device: str) -> bool:
    """What `choose_batching` says for a new cache, as far as that is known without weights.

    `auto` counts on the self-test, and takes any layer for a recurrent one.
    """
    if batching is not Batching.auto:
        return batching is Batching.packed
    if not may_be_flash(target):
        return False  # known without torch, which takes seconds to import
    place = choose_device(device)
    backend = {"attention": attention_backend(target, place), "gdn": gdn_backend(place)}
    return _has_kernels(backend, target)


def keeps_apart(target: Target, samples: Sequence[np.ndarray], *, last_hidden: bool) -> bool:
    """Whether the self-test proves packed batches on a loaded target; says why not."""
    spec = target.info.spec(str(target.device), last_hidden=last_hidden, packed=True)
    try:
        self_test(target, spec, samples)
    except TargetError as error:
        note(f"batches are padded: {error}")
        return False
    return True


def _has_kernels(backend: dict[str, str], target: TargetConfig) -> bool:
    recurrent = backend.get("gdn", "fla").startswith("fla")
    attention = backend["attention"].startswith("flash_attention")
    return recurrent and attention and target.tensor_parallel == 1
