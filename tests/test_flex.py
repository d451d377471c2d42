"""Flex attention against SDPA: the mask, and the check that a device has to pass."""

import pytest
import torch

from shared.errors import TrainingError
from stage2_train import attention, flex

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 20])
def test_the_mask_is_that_of_sdpa(window):
    assert flex.check(CPU, 8, window) < 1e-5


def test_trap_34_a_broken_kernel_is_refused():
    def leaks(*inputs):
        return attention.blocks_attend(*inputs[:5], inputs[5], None)

    with pytest.raises(TrainingError, match="flex attention differs"):
        flex.check(CPU, 8, 20, leaks)
    with pytest.raises(TrainingError, match="nan"):
        flex.check(CPU, 8, None, lambda *inputs: inputs[0] * float("nan"))


@pytest.mark.gpu
def test_results_and_gradients_on_the_device():
    device = torch.device("cuda")
    for window in (None, 20):
        assert flex.check(device, 64, window) < flex.TOLERANCE
