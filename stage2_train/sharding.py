"""FSDP2 for the drafter: matrices are cut by rows over the ranks, layer by layer.

Dtypes are as on one rank. Masters, gradients and their sums are float32; a layer's matrices are
gathered in the compute dtype right before they are used. Vectors (norms, A_log, dt_bias) are
neither cut nor cast: they are small, and rounding them to bfloat16 would change the model. Their
gradients are summed by `ranks`, as under data parallelism.

`fsdp` cuts one copy over all ranks. `hsdp` cuts a copy over every `shard_ranks` neighbours, usually
the GPUs of a machine: only sums of gradients then cross the slower links.
"""

import os
from collections.abc import Iterable

import torch
from torch import Tensor

from shared.errors import ConfigError
from stage2_train.batch import Batch
from stage2_train.config import Parallel, TrainerConfig
from stage2_train.ownership import Grid, edges, local


def shard_(drafter: torch.nn.Module, cfg: TrainerConfig, world: int, device: torch.device) -> None:
    """Cuts the drafter's matrices in place; every rank must hold the same initial weights.

    Raises:
        ConfigError: `shard_ranks` doesn't divide the ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape, names = (world,), ("shard",)
    if cfg.parallel is Parallel.hsdp:
        size = cfg.shard_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if world % size:
            raise ConfigError(
                f"{world} ranks can't be cut into groups of {size}", where="trainer.shard_ranks"
            )
        shape, names = (world // size, size), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(
        param_dtype=drafter.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    whole = {parameter for parameter in drafter.parameters() if parameter.ndim < 2}
    for module in (*drafter.layers, drafter):
        fully_shard(
            module, mesh=mesh, mp_policy=policy, ignored_params=whole, reshard_after_forward=True
        )
        # The loss was divided by the step's weight: gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def is_cut(tensor: Tensor) -> bool:
    """Whether this rank holds a part of it only."""
    return hasattr(tensor, "to_local")


def held(full: Tensor, like: Tensor) -> Tensor:
    """The rows of a whole tensor that this rank holds of `like`."""
    if not is_cut(like):
        return full
    grid = Grid.of(like)
    low, high = edges(full.shape[0], grid.shards)[grid.shard]
    return full[low:high]


def copy_(own: Tensor, full: Tensor) -> None:
    """Copies a whole tensor, or this rank's rows of it, in place."""
    local(own).copy_(held(full, own))


def sum_over_shards(values: Tensor, owners: Iterable[Tensor]) -> Tensor:
    """Sums each row of `values` over the shards of its owner, in place; whole ones stay.

    Raises nothing; every rank of the shards must call it.
    """
    owners = list(owners)
    cut = [i for i, owner in enumerate(owners) if is_cut(owner)]
    if cut:
        values[cut] = Grid.of(owners[cut[0]]).total(values[cut])
    return values


def idle_batch(num_states: int, hidden_size: int, device: torch.device) -> Batch:
    """The smallest row with an anchor: a rank without a row passes it, times zero, because all
    ranks have to gather every layer equally often."""
    hidden_TLD = torch.zeros(3, num_states, hidden_size, dtype=torch.bfloat16)
    return Batch.pack(["idle"], [torch.zeros(3)], hidden_TLD, [torch.ones(3)], [torch.ones(1)]).to(
        device
    )
