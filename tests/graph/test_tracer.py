from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.graph.forward_pass import ModelCopy, one_pass
from ecc.graph.labels import FROZEN, ChannelLabels, Misaligned, Role
from ecc.graph.ops import registry
from ecc.graph.tracer import Deferred, Tracer
from graph.cases import conv, image, named
from graph.following import Following, merged

# ---------------------------------------------------------------- labels of tensors


def test_a_vector_has_the_labels_of_its_axis() -> None:
    following = Following()
    bias = following.parameter("b", 4)
    assert following.along(bias, axis=0) == following.axis("b", 0)
    scale = following.parameter("s", 1, 4, 1)
    assert following.along(scale, axis=1) == following.axis("s", 1)


def test_the_role_is_the_one_it_was_asked_in() -> None:
    following = Following()
    following.tracer.labels(following.parameter("b", 4), Role.PRODUCER)
    assert following.roles("b") == {0: {Role.PRODUCER}}


def test_a_parameter_of_several_axes_waits_for_its_channels() -> None:
    following = Following()
    weight = following.parameter("w", 4, 3)
    assert following.tracer.is_deferred(weight)
    assert following.tracer.labels(weight, defer=True) is None
    assert (following.labels(weight) == FROZEN).all()
    assert following.channel_labels.axes == {}


def test_numbers_have_no_labels_and_tensors_from_nowhere_are_frozen() -> None:
    following = Following()
    assert following.tracer.labels(None) is None
    assert following.labels(following.parameter("temperature", 1)) is None
    assert following.labels(torch.tensor(3.0)) is None
    assert (following.labels(torch.zeros(2, 3)) == FROZEN).all()


def test_a_whole_number_parameter_is_frozen() -> None:
    following = Following()
    index = torch.zeros(3, dtype=torch.long)
    following.tracer.name(index, "order")
    assert (following.labels(index) == FROZEN).all()


# ---------------------------------------------------------------- weights by name


@pytest.mark.parametrize(
    ("change", "name", "order"),
    [
        (lambda w: w, "w", (0, 1)),
        (lambda w: w.t(), "w", (1, 0)),
        (lambda w: w.t().t(), "w", (0, 1)),
        (lambda w: w.mT, "w", (1, 0)),
        (lambda w: w.permute(1, 0), "w", (1, 0)),
        (lambda w: w * 2, None, None),
        (lambda w: w[:2], None, None),
        (lambda w: w.reshape(3, 4), None, None),
        (lambda w: w.flatten(), None, None),
        (lambda w: w.clone(), None, None),
    ],
)
def test_a_weight_is_known_by_name_while_it_is_only_permuted(change: Any, name: str | None, order: Any) -> None:
    following = Following()
    weight = following.run(change, following.parameter("w", 4, 3))
    assert following.tracer.weight_name(weight) == name
    if order is not None:
        assert following.tracer.axis_order(weight) == order


@pytest.mark.parametrize(
    "change", [lambda w: w.permute(2, 0, 1), lambda w: w.movedim(0, 2), lambda w: w.transpose(0, 2)]
)
def test_axes_are_followed_through_permutations(change: Any) -> None:
    following = Following()
    weight = following.run(change, following.parameter("w", 4, 3, 5))
    sizes = [(4, 3, 5)[axis] for axis in following.tracer.axis_order(weight)]
    assert sizes == list(weight.shape)


def test_a_deferred_parameter_knows_its_elements() -> None:
    shape = torch.Size([2, 3])
    numbers = torch.arange(6).view(2, 3)
    assert torch.equal(Deferred("w", shape, (0, 1)).elements(), numbers)
    assert torch.equal(Deferred("w", shape, (1, 0)).elements(), numbers.t())
    index = torch.tensor([5, 0])
    assert Deferred("w", shape, (), index).elements() is index


@pytest.mark.parametrize(
    ("change", "axis"),
    [
        (lambda p: p.t()[None, :, :], 1),  # (1, 4, 5)
        (lambda p: p.unsqueeze(0).transpose(1, 2), 1),
        (lambda p: p.flip(0).t(), 1),
        (lambda p: p[torch.tensor([4, 3, 2, 1, 0])].t(), 1),  # a table of relative positions
        (lambda p: p.reshape(1, 5, 4).transpose(1, 2), 1),
        (lambda p: 2 * p.t(), 1),
    ],
)
def test_a_parameter_that_moved_still_finds_its_channel_axis(change: Any, axis: int) -> None:
    following = Following()
    x, table_ = following.channels(2, 4, 5), following.parameter("p", 5, 4)
    out = following.run(lambda a, p: a + change(p), x, table_)
    assert following.along(out) == following.axis("x", 0)
    assert following.frozen() == {}
    assert following.tied() == merged(following.axis("x", 0), following.axis("p", axis))


def test_a_parameter_that_meets_channels_askew_freezes_them() -> None:
    following = Following()
    x, square = following.channels(2, 4), following.parameter("p", 2, 2)
    following.run(lambda a, p: a + p.flatten(), x, square)
    assert sorted(following.frozen()) == following.axis("x", 0)


# ---------------------------------------------------------------- what a pass writes down


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = named(conv1=conv(3, 8), norm=nn.BatchNorm2d(8))
        self.head = conv(8, 4, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(F.relu(x) + 1)


def passed(net: nn.Module, *, training: bool = False, **settings: Any) -> Tracer:
    tracer = Tracer(ChannelLabels(), recording=True, **settings)
    return one_pass(ModelCopy.of(net, on_meta=True), image()(), tracer, training=training)


def test_records_name_the_module_and_what_it_did() -> None:
    tracer = passed(Net())
    assert [(r.path, r.kind, r.tensors) for r in tracer.records] == [
        ("body.conv1", "conv", ["body.conv1.weight", "body.conv1.bias"]),
        ("body.norm", "norm", [f"body.norm.{t}" for t in ("weight", "bias", "running_mean", "running_var")]),
        ("", "elementwise", []),
        ("", "elementwise", []),
        ("head", "conv", ["head.weight", "head.bias"]),
    ]
    first = tracer.records[0]
    assert [(labels.numel(), times) for labels, times in first.reads] == [(1, 2 * 3 * 64)]
    assert [(labels.numel(), times) for labels, times in first.writes] == [(8, 2 * 64)]
    assert first.item_bytes == 4


def test_a_pass_knows_which_parameters_it_reached() -> None:
    reached = passed(Net()).reached
    assert "head.bias" in reached
    assert "unused.weight" not in reached


def test_counting_batches_is_no_operator_of_the_network() -> None:
    tracer = passed(Net(), training=True)
    assert "body.norm.num_batches_tracked" not in tracer.reached
    assert all(str(func) != "aten.add_.Tensor" for func, *_ in tracer.sequence)


def test_the_sequence_tells_networks_apart() -> None:
    assert passed(Net()).sequence == passed(Net()).sequence
    assert passed(Net()).sequence != passed(named(conv1=conv(3, 8), head=conv(8, 4, 1))).sequence


def test_nothing_is_recorded_unless_asked_for() -> None:
    tracer = Tracer(ChannelLabels())
    one_pass(ModelCopy.of(Net(), on_meta=True), image()(), tracer, training=False)
    assert tracer.records == []


def test_paths_end_with_the_pass() -> None:
    tracer = passed(Net())
    assert tracer.path == []
    assert tracer.last_path == "head"


# ---------------------------------------------------------------- lines of code


def split(x: Tensor) -> Tensor:
    return x.view(2, 2, 3, 5)


LINE = f"view@test_tracer.py:{split.__code__.co_firstlineno + 1}"


def test_a_guess_is_noted_with_its_line_and_its_labels() -> None:
    following = Following()
    following.run(split, following.channels(2, 6, 5))
    ((line, options, labels),) = following.tracer.guesses
    assert (line, options) == (LINE, 3)  # shrink the last factor, the first, or neither
    assert labels.tolist() == following.axis("x", 0)


def test_a_stopped_line_freezes_what_enters_it() -> None:
    following = Following()
    following.tracer.stops[LINE] = "the view has a fixed size"
    out = following.run(split, following.channels(2, 6, 5))
    assert (following.labels(out) == FROZEN).all()
    assert following.frozen() == dict.fromkeys(following.axis("x", 0), "the view has a fixed size")


def test_an_operator_that_cannot_run_tells_its_line_and_what_entered() -> None:
    following = Following()
    x = following.channels(2, 7, 5)
    with pytest.raises(Misaligned, match=r"^view has a fixed size$") as caught:
        following.run(split, x)
    assert caught.value.line == LINE
    assert caught.value.labels.tolist() == following.axis("x", 0)


# ---------------------------------------------------------------- rules that fail


def test_a_rule_that_fails_freezes_instead_of_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trace: Tracer, call: Any) -> Any:
        raise IndexError("not that axis")

    monkeypatch.setattr(table, "rule_for", lambda func, name: broken)
    following = Following()
    out = following.run(F.relu, following.channels(2, 4, 5))
    assert (following.labels(out) == FROZEN).all()
    assert set(following.frozen().values()) == {"the rule of relu failed (IndexError: not that axis)"}


def test_real_constants_meet_meta_tensors() -> None:
    following = Following()
    out = following.run(lambda x: x + torch.tensor([[1.0], [2.0], [3.0], [4.0]]), following.channels(2, 4, 5))
    assert out.device.type == "meta"
    assert sorted(following.frozen()) == following.axis("x", 0)
