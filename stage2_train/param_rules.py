"""Who owns which parameter, and into which parts Muon splits a matrix.

A stored matrix is often several linear maps: the heads of a projection, a fused q/k/v, the gate and
up halves of a SwiGLU. Muon has to orthogonalise each map alone, so a module declares its matrices'
`Parts`: rows (dim 0) as slices, with a role and a number of heads. The declaration is checked to
cover every row exactly once. A matrix that nobody declared is an error, not a default.

    parts = {
        "q_proj.weight": by_head("q", num_heads=8, head_dim=64),
        "gate_up.weight": stacked([("gate", 1024, 1), ("up", 1024, 1)]),
        "down.weight": whole("down"),
        "a_proj.weight": elementwise("decay gate, one row a head"),
    }
    table = route(model.named_parameters(), parts)
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.errors import ConfigError

MIN_DIM = 16  # a matrix with a smaller dim is a bundle of vectors: AdamW


@dataclass(frozen=True)
class Part:
    """Rows start, start+step, … < stop of a matrix, in this order `heads` blocks of equal size."""

    role: str
    start: int
    stop: int
    step: int = 1
    heads: int = 1

    @property
    def rows(self) -> int:
        return len(range(self.start, self.stop, self.step))


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Elementwise:
    """Declares that a matrix is no linear map between features and belongs to AdamW."""

    reason: str


def whole(role: str) -> Parts:
    """The matrix is one map, whatever its number of rows."""
    return (Part(role, 0, -1),)


def by_head(role: str, num_heads: int, head_dim: int) -> Parts:
    """[num_heads * head_dim, in]: one map per head."""
    return (Part(role, 0, num_heads * head_dim, 1, num_heads),)


def stacked(pieces: Sequence[tuple[str, int, int]]) -> Parts:
    """Fused storage, one piece after the other: (role, rows, heads) each."""
    parts, start = [], 0
    for role, rows, heads in pieces:
        parts.append(Part(role, start, start + rows, 1, heads))
        start += rows
    return tuple(parts)


def interleaved(roles: Sequence[str], rows: int, heads: int = 1) -> Parts:
    """Row-interleaved storage: row i is of roles[i % len(roles)]; each role has `rows` rows."""
    stride = len(roles)
    return tuple(Part(role, i, rows * stride, stride, heads) for i, role in enumerate(roles))


def grouped(groups: int, pieces: Sequence[tuple[str, int, int]]) -> Parts:
    """Storage by key-head group: `groups` times all pieces (role, rows, heads) of one group.

    The heads of a role in different groups belong together when several heads are taken as one map.
    """
    width = sum(rows for _, rows, _ in pieces)
    return tuple(
        Part(part.role, part.start + g * width, part.stop + g * width, 1, part.heads)
        for g in range(groups)
        for part in stacked(pieces)
    )


def elementwise(reason: str) -> Elementwise:
    """The matrix goes to AdamW (embeddings, heads, per-head gates), and why."""
    return Elementwise(reason)


@dataclass(frozen=True)
class Block:
    """One map to orthogonalise: row slices (start, stop, step) of a parameter, concatenated."""

    role: str
    slices: tuple[tuple[int, int, int], ...]

    @property
    def rows(self) -> int:
        return sum(len(range(*piece)) for piece in self.slices)


def resolve(name: str, parts: Parts, rows: int) -> Parts:
    """Fills in `whole` and checks that the parts cover rows 0..rows-1 exactly once.

    Raises:
        ConfigError: a row is missing or covered twice; heads don't divide a part.
    """
    parts = tuple(Part(p.role, 0, rows, 1, p.heads) if p.stop == -1 else p for p in parts)
    count = [0] * rows
    for part in parts:
        if part.heads < 1 or part.rows % part.heads or part.rows == 0:
            raise ConfigError(
                f"part {part.role!r} has {part.rows} rows for {part.heads} heads", where=name
            )
        if part.start < 0 or part.stop > rows + part.step - 1:
            raise ConfigError(f"part {part.role!r} ends beyond row {rows}", where=name)
        for row in range(part.start, part.stop, part.step):
            count[row] += 1
    wrong = next((row for row, times in enumerate(count) if times != 1), None)
    if wrong is not None:
        raise ConfigError(
            f"row {wrong} of {rows} is covered by {count[wrong]} parts",
            where=name,
            do="A matrix's parts must cover each row exactly once",
        )
    return parts


def blocks(parts: Parts, head_group: int = 1) -> list[Block]:
    """The maps of a matrix, `head_group` heads of a role together (0: all of them)."""
    heads: dict[str, list[tuple[int, int, int]]] = {}
    for part in parts:
        size = part.rows // part.heads * part.step
        heads.setdefault(part.role, []).extend(
            (start, min(start + size, part.stop), part.step)
            for start in range(part.start, part.start + size * part.heads, size)
        )
    result = []
    for role, slices in heads.items():
        size = head_group or len(slices)
        result += [Block(role, _merge(slices[i : i + size])) for i in range(0, len(slices), size)]
    return result


def _merge(slices: list[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Joins neighbouring slices, so that adjacent heads are one view."""
    merged = [slices[0]]
    for start, stop, step in slices[1:]:
        last = range(*merged[-1])
        if step == last.step and start == last[-1] + step:
            merged[-1] = (last.start, stop, step)
        else:
            merged.append((start, stop, step))
    return tuple(merged)


@dataclass(frozen=True)
class Route:
    """One row of the routing table."""

    name: str
    shape: tuple[int, ...]
    owner: str  # muon, adamw, frozen or tied
    parts: Parts
    reason: str


@dataclass(frozen=True)
class RoutingTable:
    """Every named parameter with its owner; printed (layers folded) and saved with a run."""

    rows: tuple[Route, ...]

    def owned(self, owner: str) -> list[Route]:
        return [row for row in self.rows if row.owner == owner]

    @property
    def parts_digest(self) -> str:
        """Changes when Muon's matrices or their parts do; compared when a checkpoint is loaded."""
        text = repr([(row.name, row.shape, row.parts) for row in self.owned("muon")])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def text(self) -> str:
        lines = []
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            lines.append((row.name, shape, row.owner, _parts_text(row.parts) or row.reason))
        widths = [max((len(line[i]) for line in lines), default=0) for i in range(3)]
        return "".join(
            f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {owner:<{widths[2]}}  {why}\n"
            for name, shape, owner, why in lines
        )

    def folded(self) -> str:
        """`text` with like rows of several layers as one: `layers.*.mlp.up_proj.weight x5`."""
        like: dict[tuple, list[str]] = {}
        for row in self.rows:
            key = re.sub(r"\.\d+\.", ".*.", row.name), row.shape, row.owner, row.parts, row.reason
            like.setdefault(key, []).append(row.name)
        rows = [
            Route(names[0] if len(names) == 1 else f"{key[0]} x{len(names)}", *key[1:])
            for key, names in like.items()
        ]
        return RoutingTable(tuple(rows)).text()


def _parts_text(parts: Parts) -> str:
    texts: dict[str, list[int]] = {}
    for part in parts:
        entry = texts.setdefault(part.role, [0, 0])
        entry[0] += part.heads
        entry[1] = part.rows // part.heads
    return ", ".join(
        f"{role}: {rows} rows" if heads == 1 else f"{role}: {heads} heads of {rows} rows"
        for role, (heads, rows) in texts.items()
    )


def route(
    named_parameters: Iterable[tuple[str, object]],
    parts: Mapping[str, Parts | Elementwise],
    *,
    muon: bool = True,
) -> RoutingTable:
    """Assigns every parameter to one owner, by identity and by its declared function.

    Args:
        named_parameters: (name, parameter) pairs; a parameter met again under another name is tied.
        parts: declarations by name; needed for every trainable matrix with both dims >= 16.
        muon: False sends everything trainable to AdamW (declarations are still checked).

    Raises:
        ConfigError: an undeclared matrix, a declaration without a parameter, a bad cover, or two
            trainable parameters that share storage without being the same object.
    """
    pairs = list(named_parameters)
    unknown = sorted(set(parts) - {name for name, _ in pairs})
    if unknown:
        raise ConfigError(f"parts are declared for {unknown[0]}, which is not a parameter")
    rows, seen, storages = [], {}, {}
    for name, parameter in pairs:
        shape = tuple(parameter.shape)
        if id(parameter) in seen:
            rows.append(Route(name, shape, "tied", (), f"the same tensor as {seen[id(parameter)]}"))
            continue
        seen[id(parameter)] = name
        if not parameter.requires_grad:
            rows.append(Route(name, shape, "frozen", (), "requires no gradient"))
            continue
        held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if held.device.type != "meta" and held.numel():
            pointer = (held.device, held.data_ptr())
            if pointer in storages:
                raise ConfigError(
                    f"{name} and {storages[pointer]} share their memory but are two parameters",
                    do="Tie them as one parameter object",
                )
            storages[pointer] = name
        rows.append(_owner(name, shape, parts.get(name), muon))
    return RoutingTable(tuple(rows))


def _owner(name: str, shape: tuple[int, ...], declared, muon: bool) -> Route:
    if isinstance(declared, Elementwise):
        return Route(name, shape, "adamw", (), declared.reason)
    if len(shape) != 2:
        if declared is not None:
            raise ConfigError(
                f"parts are declared for {len(shape)}-D {name}; only matrices have any"
            )
        return Route(name, shape, "adamw", (), f"{len(shape)}-D")
    resolved = () if declared is None else resolve(name, declared, shape[0])
    if min(shape) < MIN_DIM:
        return Route(name, shape, "adamw", (), f"a dim below {MIN_DIM}")
    if declared is None:
        raise ConfigError(
            f"{name} {list(shape)} is a matrix without declared parts",
            do="Declare whole(role), by_head(…), … or elementwise(reason) in the module's parts()",
        )
    if not muon:
        return Route(name, shape, "adamw", (), "everything is AdamW's")
    return Route(name, shape, "muon", resolved, "")
