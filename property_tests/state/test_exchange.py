"""Laws of the exchange planner: every rank gets exactly what it wants, whatever the layout, the piece and the ranks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fzero.layout.layout import Layout
from fzero.state.exchange import Part, find_owners, plan, ranks_by_position
from fzero.testing.strategies import layouts


def draw_piece(data: st.DataObject, layout: Layout) -> tuple[int, range]:
    """A leaf of a layout, and some of the leaf's elements."""
    leaf = data.draw(st.integers(0, len(layout.leaves) - 1))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, layout.leaves[leaf].numel)] * 2)))
    return leaf, range(start, stop)


@given(layouts(), st.data())
def test_each_rank_is_sent_what_it_keeps_and_nothing_else(layout: Layout, data: st.DataObject) -> None:
    leaf, piece = draw_piece(data, layout)
    ranks = data.draw(st.permutations(range(layout.mesh.size())))
    source = data.draw(st.sampled_from(ranks))
    messages = plan([Part(source, piece)], find_owners(layout, leaf, piece, ranks_by_position(layout, ranks)))
    received = Counter((message.receiver, element) for message in messages for element in message.elements)
    axis = layout.mesh.shard_axis
    parts = {rank: layout.part(leaf, layout.mesh.position(number, axis)) for number, rank in enumerate(ranks)}
    assert received == Counter((rank, element) for rank, part in parts.items() for element in piece if element in part)
    assert {message.sender for message in messages} <= {source}


@given(layouts(), st.data())
def test_one_rank_collects_each_element_once_from_the_rank_that_keeps_it(layout: Layout, data: st.DataObject) -> None:
    leaf, piece = draw_piece(data, layout)
    row = [[rank] for rank in range(layout.world)]
    receiver = data.draw(st.sampled_from(row))[0]
    have = find_owners(layout, leaf, piece, row)
    messages = plan(have[:1] if layout.replicated else have, [Part(receiver, piece)])
    assert sorted(element for message in messages for element in message.elements) == list(piece)
    assert all(element in layout.part(leaf, message.sender) for message in messages for element in message.elements)
