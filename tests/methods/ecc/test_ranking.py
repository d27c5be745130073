from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.methods.ecc.ranking import ChannelRanking


def test_channels_are_sorted_within_their_group() -> None:
    ranking = ChannelRanking([3, 1, 4])
    importance = torch.tensor([5.0, 1.0, 3.0, 9.0, 2.0, 2.0, 7.0, 0.5])
    alive = torch.tensor([True, True, True, True, True, True, True, False])
    ranked = ranking.sort(importance, alive)
    assert ranked.channels.tolist() == [1, 2, 0, 3, 4, 5, 6, 7]  # ties by number, the dead channel last
    assert ranked.importance.tolist() == [1, 3, 5, 9, 2, 2, 7, torch.inf]
    assert ranked.widths.tolist() == [3, 1, 3]
    assert ranking.next_importance(ranked).tolist() == [1, 9, 2]
    assert ranking.next_importance(ranked, torch.tensor([2, 1, 2])).tolist() == [5, torch.inf, 7]
    kept = [True, False, True, True, False, False, True, False]
    assert ranking.remove_least(ranked, torch.tensor([1, 0, 2])).tolist() == kept


def test_nan_is_the_largest_importance_and_negative_zero_stays_in_its_group() -> None:
    ranked = ChannelRanking([4]).sort(torch.tensor([torch.nan, 1.0, torch.inf, 0.0]), torch.tensor([1, 1, 1, 0]).bool())
    assert ranked.channels.tolist() == [1, 0, 2, 3]
    ranked = ChannelRanking([2, 2]).sort(torch.tensor([3.0, 1.0, -0.0, 2.0]), torch.ones(4, dtype=torch.bool))
    assert ranked.channels.tolist() == [1, 0, 2, 3]


@given(st.lists(st.floats(0, width=32), min_size=2, max_size=40), st.integers(1, 39))
def test_all_floats_are_sorted_including_zeros_denormals_and_infinity(values: list[float], split: int) -> None:
    first = min(split, len(values) - 1)
    ranked = ChannelRanking([first, len(values) - first]).sort(torch.tensor(values), torch.ones(len(values)).bool())
    order = sorted(range(first), key=values.__getitem__) + sorted(range(first, len(values)), key=values.__getitem__)
    expected = torch.tensor(values).clamp(max=torch.finfo(torch.float32).max)[torch.tensor(order)]
    assert torch.equal(ranked.importance, expected)
    assert (ranked.channels < first).tolist() == [True] * first + [False] * (len(values) - first)


@given(st.data())
def test_removal_equals_a_loop_over_channels(data: st.DataObject) -> None:
    full = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    count = sum(full)
    values = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))  # few values, many ties
    alive = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    ranking = ChannelRanking(full)
    ranked = ranking.sort(torch.tensor(values, dtype=torch.float32), torch.tensor(alive))
    removed, expected, first = [], list(alive), 0
    for width in full:
        live = sorted((values[i], i) for i in range(first, first + width) if alive[i])
        removed.append(data.draw(st.integers(0, len(live))))
        for _, channel in live[: removed[-1]]:
            expected[channel] = False
        first += width
    kept = ranking.remove_least(ranked, torch.tensor(removed))
    assert kept.tolist() == expected
    assert ranking.widths(kept).tolist() == [int(part.sum()) for part in torch.tensor(expected).split(full)]
