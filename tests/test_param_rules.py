"""Parts cover every row once; every trainable parameter has one owner."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared.errors import ConfigError
from stage2_train.param_rules import (
    Part,
    blocks,
    by_head,
    elementwise,
    grouped,
    interleaved,
    resolve,
    route,
    stacked,
    whole,
)


class Tiny(nn.Module):
    """One of everything that a drafter has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.q_proj = nn.Linear(32, 64, bias=False)
        self.a_proj = nn.Linear(32, 4, bias=False)
        self.b_proj = nn.Linear(32, 48, bias=False)
        self.q_conv1d = nn.Conv1d(64, 64, 4, groups=64, bias=False)
        self.A_log = nn.Parameter(torch.zeros(4))
        self.row = nn.Parameter(torch.ones(1, 32))
        self.gate_up = nn.Linear(32, 96)
        self.down = nn.Linear(48, 32, bias=False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(32, 32), requires_grad=False)

    def parts(self):
        return {
            "embed.weight": elementwise("embedding"),
            "q_proj.weight": by_head("q", 4, 16),
            "b_proj.weight": elementwise("write gate, one row a head"),
            "gate_up.weight": stacked([("gate", 48, 1), ("up", 48, 1)]),
            "down.weight": whole("down"),
        }


GOLDEN = """\
A_log                4  adamw   1-D
row               1x32  adamw   a dim below 16
frozen           32x32  frozen  requires no gradient
embed.weight     64x32  adamw   embedding
q_proj.weight    64x32  muon    q: 4 heads of 16 rows
a_proj.weight     4x32  adamw   a dim below 16
b_proj.weight    48x32  adamw   write gate, one row a head
q_conv1d.weight 64x1x4  adamw   3-D
gate_up.weight   96x32  muon    gate: 48 rows, up: 48 rows
gate_up.bias        96  adamw   1-D
down.weight      32x48  muon    down: 32 rows
head.weight      64x32  tied    the same tensor as embed.weight
"""


def test_trap_29_the_routing_table_is_golden():
    model = Tiny()
    table = route(model.named_parameters(remove_duplicate=False), model.parts())
    assert [line.split() for line in table.text().splitlines()] == [
        line.split() for line in GOLDEN.splitlines()
    ]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    owned = [row.name for row in table.rows if row.owner in {"muon", "adamw"}]
    named = dict(model.named_parameters())
    assert sorted(id(named[name]) for name in owned) == sorted(trainable)


def test_adamw_alone_owns_everything_trainable():
    model = Tiny()
    table = route(model.named_parameters(), model.parts(), muon=False)
    assert {row.owner for row in table.rows} == {"adamw", "frozen"}


def test_an_undeclared_matrix_is_an_error():
    model = Tiny()
    parts = model.parts()
    del parts["down.weight"]
    with pytest.raises(ConfigError, match=r"down\.weight \[32, 48\] is a matrix without declared"):
        route(model.named_parameters(), parts)
    with pytest.raises(ConfigError, match="nowhere, which is not a parameter"):
        route(model.named_parameters(), model.parts() | {"nowhere": whole("x")})
    with pytest.raises(ConfigError, match="3-D"):
        route(model.named_parameters(), model.parts() | {"q_conv1d.weight": whole("conv")})


def test_trap_31_two_parameters_in_one_storage_are_refused():
    model = Tiny()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    parts = model.parts() | {"head.weight": elementwise("head")}
    with pytest.raises(ConfigError, match="share their memory"):
        route(model.named_parameters(), parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Part("a", 0, 8),), "row 8 of 16 is covered by 0"),
        ((Part("a", 0, 9), Part("b", 8, 16)), "row 8 of 16 is covered by 2"),
        ((Part("a", 0, 32, 1, 2),), "ends beyond"),
        ((Part("a", 0, 16, 1, 3),), "16 rows for 3 heads"),
    ],
)
def test_a_bad_cover_fails_loudly(parts, message):
    with pytest.raises(ConfigError, match=message):
        resolve("w", parts, 16)


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_blocks_are_a_partition_of_the_rows(groups, pieces, head_group):
    named = [(f"role{i}", heads * size, heads) for i, (heads, size) in enumerate(pieces)]
    rows = groups * sum(heads * size for heads, size in pieces)
    parts = resolve("w", grouped(groups, named), rows)
    found = [r for block in blocks(parts, head_group) for s in block.slices for r in range(*s)]
    assert sorted(found) == list(range(rows))
    if head_group == 0:
        assert len(blocks(parts, 0)) == len(pieces)


def test_head_groups_and_interleaved_rows():
    q = resolve("q", by_head("q", 4, 8), 32)
    assert [block.rows for block in blocks(q, 1)] == [8] * 4
    assert [block.slices for block in blocks(q, 2)] == [((0, 16, 1),), ((16, 32, 1),)]
    assert [block.slices for block in blocks(q, 0)] == [((0, 32, 1),)]
    gate_up = resolve("gate_up", interleaved(["gate", "up"], 16), 32)
    assert [block.slices for block in blocks(gate_up)] == [((0, 32, 2),), ((1, 32, 2),)]
    by_key_head = resolve("qkv", grouped(2, [("q", 8, 1), ("v", 16, 2)]), 48)
    assert blocks(by_key_head, 0)[0].slices == ((0, 8, 1), (24, 32, 1))
