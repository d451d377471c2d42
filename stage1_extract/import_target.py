"""The target that imported states are said to come from: proven on the states, kept for training.

T: tokens of a sample; L: states; D: channels.
"""

from dataclasses import replace

import numpy as np

from shared.capture import capture, pad_batch
from shared.config import TapRule, TargetConfig
from shared.errors import DataError, MismatchError
from shared.log import note
from shared.spec import CaptureSpec
from shared.store import Store
from shared.target import choose_device, describe_target, load_target
from stage1_extract.checks import relative_error
from stage1_extract.frozen import write_assets

# Mean relative error of a state against ours. Other kernels and bf16 arithmetic give up to 3e-2; a
# neighbouring layer or another token gives .1 and more.
TOLERANCE = 0.06
_TEST_TOKENS, _TEST_SAMPLES = 256, 2


class ImportTarget:
    """Loads the named target; the first samples are held against it before anything is written."""

    def __init__(self, cfg: TargetConfig, layer_ids: list[int], device: str) -> None:
        cfg = replace(cfg, tap_rule=TapRule.explicit, layer_ids=list(layer_ids))
        place, self.info = choose_device(device), describe_target(cfg)
        assert self.info.layer_ids == list(layer_ids)  # in range and ascending, or refused
        note(f"loading {cfg.name} on {place}")
        self.target = load_target(cfg, place, self.info)
        self._to_test = _TEST_SAMPLES

    def spec(self, plain: CaptureSpec) -> CaptureSpec:
        """The files' spec with the target's digest and class."""
        return replace(plain, weights=self.info.weights, architecture=self.info.architecture)

    def check(self, ids_T: np.ndarray, hidden_TLD: np.ndarray, spec: CaptureSpec) -> None:
        """
        Raises:
            DataError: the sample can't be of this target.
            MismatchError: its states are not what the target gives for its tokens.
        """
        if int(ids_T.max()) >= (vocab := int(self.target.embed.weight.shape[0])):
            raise DataError(f"token {int(ids_T.max())} is outside the target's {vocab}")
        if hidden_TLD.shape[2] != self.info.hidden_size:
            raise DataError(
                f"states have {hidden_TLD.shape[2]} channels, the target {self.info.hidden_size}"
            )
        if self._to_test:
            self._to_test -= 1
            self._compare(ids_T[:_TEST_TOKENS], hidden_TLD[:_TEST_TOKENS], spec)

    def _compare(self, ids_T: np.ndarray, hidden_TLD: np.ndarray, spec: CaptureSpec) -> None:
        import torch

        near = sorted({layer + d for layer in spec.layer_ids for d in (-1, 0, 1)})
        near = [layer for layer in near if 0 <= layer < self.info.num_layers]
        ids_1T, lengths = pad_batch([ids_T], 0)
        ours = capture(self.target, ids_1T.to(self.target.device), lengths, near, spec.last_hidden)[
            0
        ].cpu()
        bits = torch.from_numpy(np.ascontiguousarray(hidden_TLD).view(np.int16))
        theirs = bits.view(torch.bfloat16)
        for state in range(spec.num_states):
            last = state == len(spec.layer_ids)
            place = len(near) if last else near.index(spec.layer_ids[state])
            error = relative_error(theirs[:, state], ours[:, place])
            if error <= TOLERANCE:
                continue
            name = "the last hidden state" if last else f"layer {near[place]}"
            hint = ""
            if not last:
                errors = [relative_error(theirs[:, state], ours[:, i]) for i in range(len(near))]
                nearest = int(np.argmin(errors))
                if errors[nearest] <= TOLERANCE:
                    hint = f" (they are those of layer {near[nearest]})"
            raise MismatchError(
                f"the files' states of {name} differ from the target's by {error:.2g}{hint}",
                where=self.info.cfg.name,
                do="Name the model they were made with, and layer_ids as outputs of 0-based "
                "decoder layers (transformers' hidden_states[n + 1] is layer n)",
            )

    def keep(self, store: Store) -> None:
        """Stores embedding, head and what training must know."""
        write_assets(store, self.target)


def describes(store: Store, spec: CaptureSpec) -> CaptureSpec:
    """`spec` with the cache's backend if its states came from another tool, whose backend is
    not ours to repeat."""
    if "imported_from" in store.spec.backend:
        return replace(spec, backend=store.spec.backend)
    return spec
