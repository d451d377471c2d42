"""What one forward pass sees: a packed row of whole documents with its anchors.

T tokens of the row, L stored states, D target width, N anchors, K = block - 1 predicted slots.
"""

import dataclasses
import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """A packed row. Documents stand one after the other; nothing may cross their ends.

    Attributes:
        sample_ids: the documents, in order.
        input_ids_T: int64, tokens.
        hidden_TLD: bfloat16, the target's states at the tapped layers.
        loss_mask_T: bool, supervised tokens.
        document_T: int64, 0 … documents-1.
        position_T: int64, restarts at every document.
        cu_seqlens: int64 [documents + 1], where documents start and the last one ends.
        anchor_N: int64, ascending indices into the row.
    """

    sample_ids: tuple[str, ...]
    input_ids_T: torch.Tensor
    hidden_TLD: torch.Tensor
    loss_mask_T: torch.Tensor
    document_T: torch.Tensor
    position_T: torch.Tensor
    cu_seqlens: torch.Tensor
    anchor_N: torch.Tensor

    @classmethod
    def pack(
        cls,
        sample_ids: list[str] | tuple[str, ...],
        input_ids: list[torch.Tensor],
        hidden: list[torch.Tensor] | torch.Tensor,
        masks: list[torch.Tensor],
        anchors: list[torch.Tensor],
    ) -> "Batch":
        """Puts whole documents side by side.

        Args:
            sample_ids: one per document.
            input_ids: integer [t] per document.
            hidden: bfloat16 [t, L, D] per document, or all of them already side by side.
            masks: bool [t] per document.
            anchors: int64 [n] per document, positions in the document.
        """
        lengths = torch.tensor([len(ids) for ids in input_ids], dtype=torch.int64)
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=cu_seqlens[1:])
        document_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        starts = cu_seqlens[:-1]
        return cls(
            sample_ids=tuple(sample_ids),
            input_ids_T=torch.cat(list(input_ids)).long(),
            hidden_TLD=hidden if isinstance(hidden, torch.Tensor) else torch.cat(hidden),
            loss_mask_T=torch.cat(list(masks)).bool(),
            document_T=document_T,
            position_T=torch.arange(int(cu_seqlens[-1])) - starts[document_T],
            cu_seqlens=cu_seqlens,
            anchor_N=torch.cat([a.long() + s for a, s in zip(anchors, starts, strict=True)]),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return len(self.input_ids_T)

    @property
    def num_anchors(self) -> int:
        """Blocks of the row."""
        return len(self.anchor_N)

    @property
    def num_documents(self) -> int:
        """Documents of the row."""
        return len(self.sample_ids)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same row on a device."""
        return dataclasses.replace(
            self,
            **{
                item.name: getattr(self, item.name).to(device, non_blocking=non_blocking)
                for item in dataclasses.fields(self)
                if item.name != "sample_ids"
            },
        )

    def labels(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels of slots 1 … block-1 of every anchor and whether each counts.

        A slot counts when its label is inside the row, in the anchor's own document, and
        supervised.

        Returns:
            label_NK int64 (0 where it doesn't count) and weightmask_NK bool.
        """
        slots = torch.arange(1, block, device=self.anchor_N.device)
        index_NK = self.anchor_N[:, None] + slots
        inside_NK = index_NK < self.num_tokens
        index_NK = index_NK.clamp(max=self.num_tokens - 1)
        same_NK = self.document_T[index_NK] == self.document_T[self.anchor_N][:, None]
        weightmask_NK = inside_NK & same_NK & self.loss_mask_T[index_NK]
        label_NK = self.input_ids_T[index_NK] * weightmask_NK
        return label_NK, weightmask_NK

    def digest(self, block: int) -> bytes:
        """16 bytes over what this row feeds a step: samples, packing, anchors, labels that count.

        Token ids are in the sample ids already.
        """
        _, weightmask_NK = self.labels(block)
        hasher = hashlib.blake2b(b"drafttape.row.v1", digest_size=16)
        for text in self.sample_ids:
            hasher.update(text.encode() + b"\n")
        for tensor in (self.cu_seqlens, self.anchor_N, weightmask_NK.sum(0)):
            array = tensor.cpu().numpy().astype("<i8")
            hasher.update(len(array).to_bytes(8, "little") + array.tobytes())
        return hasher.digest()
