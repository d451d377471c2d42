"""CaptureSpec: what a cache's numbers are a function of, besides the tokens."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shared.errors import CorruptionError


@dataclass(frozen=True)
class CaptureSpec:
    """One cache holds states of one spec; any other is refused.

    Args:
        weights: digest of the target's weight files.
        architecture: class name of the target.
        layer_ids: tapped decoder layers, 0-based; state i is the *output* of layer `layer_ids[i]`
            (`hidden_states[layer_ids[i] + 1]` of transformers), before the final norm.
        tap: where states are taken; "layer_output" is the only one.
        last_hidden: one more state, after all taps: the last layer's output *after* the final
            norm (what the head multiplies).
        dtype: element type of the states.
        hidden_size: channels of a state, D.
        backend: whatever changes the numbers: kernels, attention, quantisation, device type.
    """

    weights: str
    architecture: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    tap: str = "layer_output"
    last_hidden: bool = False
    dtype: str = "bfloat16"
    backend: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(int(layer) for layer in self.layer_ids))
        object.__setattr__(self, "backend", dict(sorted(self.backend.items())))
        if self.dtype != "bfloat16":
            raise ValueError(f"states are stored as bfloat16, not {self.dtype}")
        if not self.layer_ids and not self.last_hidden:
            raise ValueError("a spec needs at least one state")
        if self.hidden_size < 1:
            raise ValueError("hidden_size must be positive")

    @property
    def num_states(self) -> int:
        """L: states stored per token."""
        return len(self.layer_ids) + int(self.last_hidden)

    @property
    def digest(self) -> str:
        """32 hex digits over all fields."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(b"drafttape.spec.v1" + text.encode(), digest_size=16).hexdigest()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's states as bf16."""
        return self.num_states * self.hidden_size * 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "CaptureSpec":
        """
        Raises:
            CorruptionError: fields are missing, unknown or of a wrong kind.
        """
        try:
            return cls(**document)
        except (TypeError, ValueError, AttributeError) as error:
            raise CorruptionError(f"not a capture spec ({error})", where="cache.json") from None

    def differences(self, other: "CaptureSpec") -> list[tuple[str, Any, Any]]:
        """(field, mine, theirs) of every field that differs; `backend` key by key."""
        rows = []
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name == "backend":
                rows += [
                    (f"backend.{key}", mine.get(key), theirs.get(key))
                    for key in sorted(mine.keys() | theirs.keys())
                    if mine.get(key) != theirs.get(key)
                ]
            elif mine != theirs:
                rows.append((item.name, mine, theirs))
        return rows
