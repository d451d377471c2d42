"""Where blocks read the context: index work of a packed row, done once and shared by all layers.

Letters: T context tokens, N anchors, B block size, C chunk, Z chunks.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

GAP = 3  # zero rows between documents: the taps of the convolutions before the current token


@dataclass(frozen=True)
class Geometry:
    """Documents, chunks and anchors of one packed row.

    An anchor `a` reads context tokens `start of its document <= i < a`. Only tokens before the last
    anchor can be read, so chunks end there; the last one may reach beyond the row (padding).

    Attributes:
        document_T: int64, document of each token; documents are contiguous.
        position_T: int64, position of each token in its document.
        anchor_N: int64 ascending, 0 <= a <= T.
        anchor_document_N: int64, the document that an anchor belongs to.
        anchor_position_N: int64, position of the anchor in its document.
        block: B.
        chunk: C.
    """

    document_T: torch.Tensor
    position_T: torch.Tensor
    anchor_N: torch.Tensor
    anchor_document_N: torch.Tensor
    anchor_position_N: torch.Tensor
    block: int
    chunk: int

    @classmethod
    def of(cls, document_T, position_T, anchor_N, *, block: int, chunk: int) -> "Geometry":
        """The geometry of a row whose anchors are tokens of it (a < T)."""
        return cls(
            document_T, position_T, anchor_N, document_T[anchor_N], position_T[anchor_N],
            block, chunk,
        )  # fmt: skip

    @classmethod
    def one_document(cls, num_tokens: int, anchor_N, *, block: int, chunk: int) -> "Geometry":
        """A row that is a single document; an anchor may stand right behind it (a == T)."""
        position_T = torch.arange(num_tokens, device=anchor_N.device)
        return cls(
            torch.zeros_like(position_T), position_T, anchor_N, torch.zeros_like(anchor_N),
            anchor_N, block, chunk,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return len(self.document_T)

    @property
    def num_anchors(self) -> int:
        return len(self.anchor_N)

    @cached_property
    def masks(self) -> dict:
        """What attention layers share: block masks by (context tokens, window)."""
        return {}

    @cached_property
    def num_chunks(self) -> int:
        """Chunks up to the one that the last anchor stands in."""
        return int(self.anchor_N[-1]) // self.chunk + 1 if self.num_anchors else 0

    @cached_property
    def num_read(self) -> int:
        """Context tokens inside the chunks; later ones are read by nobody."""
        return min(self.num_tokens, self.num_chunks * self.chunk)

    @cached_property
    def anchor_chunk_N(self) -> torch.Tensor:
        return self.anchor_N // self.chunk

    @cached_property
    def anchor_bounds(self) -> list[int]:
        """Z+1 indices: anchors bounds[z] … bounds[z+1]-1 stand in chunk z."""
        counts = torch.bincount(self.anchor_chunk_N, minlength=self.num_chunks)
        return [0, *counts.cumsum(0).tolist()]

    @cached_property
    def document_ZC(self) -> torch.Tensor:
        """Documents by chunk; -1 behind the row's end."""
        size = self.num_chunks * self.chunk
        document = self.document_T[: self.num_read]
        padded = torch.nn.functional.pad(document, (0, size - len(document)), value=-1)
        return padded.view(self.num_chunks, self.chunk)

    @cached_property
    def apart_ZCC(self) -> torch.Tensor:
        """True where token i (row) mustn't see token j: later, or of another document."""
        document_ZC = self.document_ZC
        other = document_ZC[:, :, None] != document_ZC[:, None, :]
        return other | torch.ones_like(other[0]).triu(1)

    @cached_property
    def alive_ZC(self) -> torch.Tensor:
        """True where a token's document is that of the previous chunk's last token."""
        last_Z = torch.nn.functional.pad(self.document_ZC[:-1, -1], (1, 0), value=-2)
        return self.document_ZC == last_Z[:, None]

    @cached_property
    def fading_ZC(self) -> torch.Tensor:
        """True where a token is not of its chunk's last document: the carry forgets it."""
        return self.document_ZC != self.document_ZC[:, -1:]

    @cached_property
    def hidden_NC(self) -> torch.Tensor:
        """True where a token of the anchor's chunk is at or behind it, or of another document."""
        rest_N = self.anchor_N % self.chunk
        other = self.document_ZC[self.anchor_chunk_N] != self.anchor_document_N[:, None]
        return other | (torch.arange(self.chunk, device=rest_N.device) >= rest_N[:, None])

    @cached_property
    def anchor_alive_N(self) -> torch.Tensor:
        """True where the state before the anchor's chunk is of the anchor's document."""
        last_Z = torch.nn.functional.pad(self.document_ZC[:-1, -1], (1, 0), value=-2)
        return last_Z[self.anchor_chunk_N] == self.anchor_document_N

    @cached_property
    def spread_T(self) -> torch.Tensor:
        """Row of each token in the spread layout: GAP zero rows stand before every document."""
        new = torch.nn.functional.pad(self.document_T[1:] != self.document_T[:-1], (1, 0))
        return torch.arange(GAP, GAP + len(new), device=new.device) + GAP * new.cumsum(0)

    @cached_property
    def chunk_rows(self) -> torch.Tensor:
        """[Z*C] rows of the spread layout by chunk; a zero row behind the row's end."""
        size = self.num_chunks * self.chunk
        return torch.nn.functional.pad(self.spread_T[: self.num_read], (0, size - self.num_read))

    def spread(self, x_TD) -> torch.Tensor:
        """The tokens that are read, with zero rows before each document, where convolutions of
        a few taps find nothing of the document before. [T, D] -> [P, D]."""
        rows = self.spread_T[: self.num_read]
        size = int(rows[-1]) + 1 if len(rows) else GAP
        return x_TD.new_zeros(size, x_TD.shape[1]).index_copy(0, rows, x_TD[: self.num_read])

    @cached_property
    def position_NB(self) -> torch.Tensor:
        """Position of every slot in its document: anchor + slot."""
        slots = torch.arange(self.block, device=self.anchor_N.device)
        return self.anchor_position_N[:, None] + slots


@dataclass(frozen=True)
class Context:
    """Context features: as they are [T, D], and spread for convolutions (see `spread`)."""

    plain_TD: torch.Tensor
    spread_PD: torch.Tensor


# FSDP looks for the tensors among a layer's inputs that need a gradient.
torch.utils._pytree.register_dataclass(Context)
