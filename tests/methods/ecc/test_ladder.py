from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.methods.ecc.channel_ranking import ChannelRanking


def test_channels_stand_in_order_within_their_group() -> None:
    ladder = ChannelRanking([3, 1, 4])
    scores = torch.tensor([5.0, 1.0, 3.0, 9.0, 2.0, 2.0, 7.0, 0.5])
    alive = torch.tensor([True, True, True, True, True, True, True, False])
    rungs = ladder.sort(scores, alive)
    assert rungs.channels.tolist() == [1, 2, 0, 3, 4, 5, 6, 7]  # equal ones by number, the dead one last
    assert rungs.scores.tolist() == [1, 3, 5, 9, 2, 2, 7, torch.inf]
    assert rungs.widths.tolist() == [3, 1, 3]
    assert ladder.least(rungs).tolist() == [1, 9, 2]
    assert ladder.least(rungs, torch.tensor([2, 1, 2])).tolist() == [5, torch.inf, 7]
    assert ladder.without_least(rungs, torch.tensor([1, 0, 2])).tolist() == [
        *(True, False, True),
        True,
        *(False, False, True, False),
    ]


def test_a_score_that_is_no_number_keeps_its_channel() -> None:
    ladder = ChannelRanking([4])
    rungs = ladder.sort(torch.tensor([torch.nan, 1.0, torch.inf, 0.0]), torch.tensor([True, True, True, False]))
    assert rungs.channels.tolist() == [1, 0, 2, 3]


@given(st.lists(st.floats(0, width=32), min_size=2, max_size=40), st.integers(1, 39))
def test_any_floats_are_sorted_within_their_group(scores: list[float], cut: int) -> None:
    """Zeros, denormals and infinities among them: groups and scores share the bits of one number."""
    full = [min(cut, len(scores) - 1), len(scores) - min(cut, len(scores) - 1)]
    rungs = ChannelRanking(full).sort(torch.tensor(scores), torch.ones(len(scores), dtype=torch.bool))
    first = full[0]
    order = sorted(range(first), key=scores.__getitem__) + sorted(range(first, len(scores)), key=scores.__getitem__)
    largest = torch.finfo(torch.float32).max
    expected = torch.tensor(scores).clamp(max=largest)[torch.tensor(order)]
    assert torch.equal(rungs.scores, expected)
    assert (rungs.channels < first).tolist() == [True] * first + [False] * (len(scores) - first)


def test_a_negative_zero_stays_in_its_group() -> None:
    rungs = ChannelRanking([2, 2]).sort(torch.tensor([3.0, 1.0, -0.0, 2.0]), torch.ones(4, dtype=torch.bool))
    assert rungs.channels.tolist() == [1, 0, 2, 3]


@given(st.data())
def test_removing_from_the_foot_is_what_a_loop_would_do(data: st.DataObject) -> None:
    full = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    count = sum(full)
    scores = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))  # few values, many ties
    alive = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    ladder = ChannelRanking(full)
    rungs = ladder.sort(torch.tensor(scores, dtype=torch.float32), torch.tensor(alive))
    removed, expected, first = [], list(alive), 0
    for width in full:
        live = sorted((scores[i], i) for i in range(first, first + width) if alive[i])
        removed.append(data.draw(st.integers(0, len(live))))
        for _, channel in live[: removed[-1]]:
            expected[channel] = False
        first += width
    assert ladder.without_least(rungs, torch.tensor(removed)).tolist() == expected
    assert ladder.widths(torch.tensor(expected)).tolist() == [
        sum(expected[sum(full[:k]) : sum(full[: k + 1])]) for k in range(len(full))
    ]
