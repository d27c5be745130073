"""Energy-aware pruning: the layers that spend most are cut first, and what is kept is refit to the dense outputs.

T.-J. Yang, Y.-H. Chen, V. Sze, "Designing Energy-Efficient Convolutional Neural Networks using Energy-Aware Pruning",
CVPR 2017. No code was published; this is written from the description.

As in the paper: layers go in the order of their energy, the most expensive first. In each, the smallest weights are
removed, a few too many; those are restored that lower the error of the layer's output most; the kept ones are refit in
closed form, by least squares on the output. Passes over all layers follow each other. The network can be trained after
each pass (`finetune_steps`; off by default, since all methods are tuned alike at their end).

Changed for channels: the paper removes single weights, and an ordinary device gains nothing from zeros. Here a step is
one group of channels that live and die together. Its magnitude is that of all slices that read it, its error is summed
over the layers that read it, and those are refit one after the other, in the order of the forward pass. What cannot be
refit (see `refit.py`) is cut by magnitude alone.

Changed for energy: the order comes from the fitted energy model of the device in place of a model of one chip, at the
widths of each pass; for costs that know no layers, from the derivative times the width. The paper stops when the
accuracy has fallen too far; a budget has to be met whatever that costs. So a pass stops where the targets are met, and the
last group is cut no further than needed. `max_drop` brings the paper's threshold back: a group whose cut loses too much
is put back and left alone. If the budget cannot be met so, the history says it, and the threshold is given up.

If the targets are lowered later, it goes on cutting from where it is: the passes would have led there too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ecc.energy import EnergyModel
from ecc.errors import EccError, InfeasibleBudget
from ecc.graph import ChannelGroup, Role, live_masks, mask_channels_
from ecc.methods.base import PruningContext, magnitudes

from .refit import Samples, View, columns_of, fit_modules, in_evaluation, refit_, restored, sampled

_BISECTIONS = 40


@dataclass(frozen=True, kw_only=True)
class EapSettings:
    """How to cut, and on what to refit.

    Raises:
        EccError: If a value is out of its range.
    """

    cut: float | None = None
    """Share of its live channels that each group loses in a pass: a small one takes many passes, and the expensive
    groups, which go first, may be cut once more than the others. None finds, for each pass, the one share at which all
    groups together meet the targets, so that one pass is enough unless floors or `max_drop` stop some."""
    extra: float = 0.1
    """So many more than needed are removed, as a share of the cut, and the best of them restored."""
    batches: int = 4
    """Calibration batches, drawn once."""
    rows: int = 4096
    """Positions of each layer that are compared, from all calibration batches together."""
    ridge: float = 1e-3
    """Pull of the refit towards the weights as they are; see `refit.py`."""
    refit: bool = True
    """Whether kept weights are refit."""
    max_drop: float | None = None
    """How far the score on held-out data may fall below that of the dense network; None asks the budget alone."""
    finetune_steps: int = 0
    """Training steps after each pass that did not meet the targets."""

    def __post_init__(self) -> None:
        if self.cut is not None and not 0 < self.cut < 1:
            raise EccError(f"cut={self.cut} is a share of a group's channels, between 0 and 1; or None.")
        if not 0 <= self.extra < math.inf:
            raise EccError(f"extra={self.extra} is not a number of at least 0.")
        for name, least in (("batches", 1), ("rows", 1), ("finetune_steps", 0)):
            if getattr(self, name) < least:
                raise EccError(f"{name}={getattr(self, name)} is below {least}, the least it may be.")
        if not 1e-12 <= self.ridge < math.inf:
            raise EccError(f"ridge={self.ridge} is not a number of at least 1e-12; without it, nothing may be unique.")
        if self.max_drop is not None and not 0 <= self.max_drop < math.inf:
            raise EccError(f"max_drop={self.max_drop} is not a score of at least 0; or None.")


class Eap:
    """Cuts the groups one by one, those read by the most expensive layers first.

    Args:
        settings: How.
    """

    name = "eap"

    def __init__(self, settings: EapSettings | None = None) -> None:
        self.settings = settings or EapSettings()

    @property
    def needs_held_out(self) -> bool:
        """Where there is a threshold."""
        return self.settings.max_drop is not None

    def config(self) -> dict[str, Any]:
        """Its settings."""
        return asdict(self.settings)

    def start(self, work: PruningContext) -> None:
        """Keeps the dense network, whose outputs are what the refits aim at."""
        self._work = work
        self._dense = copy.deepcopy(work.model).requires_grad_(False)
        self._batches: list[Any] | None = None
        self._place: dict[str, int] | None = None  # in the stream, where the calibration batches begin
        self._passes = 0
        self._share = 1.0  # of its channels that a group keeps in this pass
        self._queue: list[str] = []
        self._closed: list[str] = []  # groups whose cut would lose too much
        self._dense_score: float | None = None
        self._gave_up = self.settings.max_drop is None  # the threshold; there may be none

    @property
    def is_done(self) -> bool:
        """Whether the targets are met."""
        return self._work.constraint_violation(self._work.widths()) <= 0

    def step(self) -> None:
        """Cuts one group; before the first of a pass, orders them."""
        work = self._work
        widths = work.widths()
        floors = dict(zip(work.graph.full_widths, work.min_widths(), strict=True))
        live = dict(zip(work.graph.full_widths, widths, strict=True))
        self._queue = [name for name in self._queue if live[name] > floors[name] and name not in self._closed]
        if not self._queue:
            self._new_pass(live, floors)
        name = self._queue.pop(0)
        group, number = work.graph[name], list(live).index(name)
        width = self._target(widths, number)
        before = None if self._gave_up else copy.deepcopy(work.model.state_dict())
        facts = {"phase": "eap", "pass": self._passes, "group": name, "width": width, **self._cut(group, width)}
        if before is not None:
            score = self._score()
            facts["score"] = score
            if self._too_low(score):
                work.model.load_state_dict(before)
                self._closed.append(name)
                facts["put_back"] = True
        work.log(facts)

    # ------------------------------------------------------------ which, and how far

    def _new_pass(self, live: Mapping[str, int], floors: Mapping[str, int]) -> None:
        work, settings = self._work, self.settings
        open_ = [name for name, width in live.items() if width > floors[name] and name not in self._closed]
        if not open_ and self._closed:
            work.log({"phase": "eap", "note": f"the budget cannot be met within max_drop={settings.max_drop}"})
            self._gave_up, self._closed = True, []
            self._new_pass(live, floors)
            return
        if not open_:
            raise InfeasibleBudget("every group is at its floor, and the targets are not met. Raise the budget.")
        if self._passes and settings.finetune_steps:
            work.train(work.model, settings.finetune_steps, work.settings.lr, work.stream)
        self._passes += 1
        self._share = self._even_share(list(live.values())) if settings.cut is None else 1 - settings.cut
        self._queue = [name for name in self.order() if name in open_]
        work.log({"phase": "eap", "pass": self._passes, "share": self._share, "order": self._queue})

    def order(self) -> list[str]:
        """The groups that can be cut, by the energy of the layers that read them, the most expensive first.

        Of several costs, the one that is farthest above its aim decides.
        """
        work = self._work
        widths = work.widths()
        vector = torch.tensor(widths, dtype=torch.float64)
        over = [float(cost.to("cpu").value(vector)) / aim for cost, aim in zip(work.costs, work.targets, strict=True)]
        cost = work.costs[over.index(max(over))].to("cpu")
        spent: dict[str, float]
        if isinstance(cost, EnergyModel):
            layers = cost.per_layer(dict(zip(work.graph.full_widths, widths, strict=True)))
            spent = {
                g.name: sum(layers.get(path, 0.0) for path in g.layers(Role.CONSUMER)) for g in work.graph.prunable
            }
        else:
            shares = (cost.gradient(vector) * vector).tolist()
            spent = dict(zip(work.graph.full_widths, shares, strict=True))
        return sorted((group.name for group in work.graph.prunable), key=lambda name: -spent[name])

    def _even_share(self, widths: list[int]) -> float:
        """The largest share of all live widths that meets the targets; 0 if none does."""
        work, low, high = self._work, 0.0, 1.0
        for _ in range(_BISECTIONS):
            share = 0.5 * (low + high)
            if work.constraint_violation(self._lower(widths, share)) <= 0:
                low = share
            else:
                high = share
        return low

    def _lower(self, widths: list[int], share: float) -> list[int]:
        return [min(*pair) for pair in zip(widths, self._work.round_widths([share * w for w in widths]), strict=True)]

    def _target(self, widths: list[int], number: int) -> int:
        """How wide a group shall be: as its share says, but at least one step narrower, and no narrower than needed."""
        work = self._work

        def rounded(width: float) -> int:
            return work.round_widths([*widths[:number], width, *widths[number + 1 :]])[number]

        def is_enough(width: int) -> bool:
            return work.constraint_violation([*widths[:number], width, *widths[number + 1 :]]) <= 0

        width = rounded(widths[number] - 1)
        last = min(width, rounded(self._share * widths[number]))
        if not is_enough(last):
            return last
        while not is_enough(width):
            width = max(last, rounded(width - 1))
        return width

    # ------------------------------------------------------------ the cut

    def _cut(self, group: ChannelGroup, width: int) -> dict[str, Any]:
        """Removes, restores and refits; what is worth telling of it."""
        work, settings = self._work, self.settings
        places = self._places(group)
        dense = self._samples(self._dense, list(places)) if places else {}
        places = {path: index for path, index in places.items() if path in dense}  # those that are really called
        live = dict(zip(work.graph.full_widths, live_masks(work.model, work.graph), strict=True))[group.name].cpu()
        order = magnitudes(work)[group.name].cpu().masked_fill(~live, -1).argsort(descending=True, stable=True).tolist()
        alive = order[: int(live.sum())]
        extra = min(math.ceil(settings.extra * (len(alive) - width)), width) if places else 0
        removed = alive[width - extra :]
        back = restored(self._views(places, dense), removed, extra) if extra else []
        dead = [unit for unit in removed if unit not in back]
        mask_channels_(work.model, work.graph, {group.name: torch.tensor(dead, dtype=torch.long)})
        if settings.refit:
            modules = fit_modules(work.model)
            for path in places:  # a layer may read what those before it gave
                inputs = self._samples(work.model, [path])[path].inputs
                refit_(modules[path], inputs, dense[path].outputs, settings.ridge)
        return {"removed": len(dead), "restored": len(back), "refit": list(places) if settings.refit else []}

    def _places(self, group: ChannelGroup) -> dict[str, Tensor]:
        """The layers that read a group and can be refit, in the order of the forward pass, and where they read it."""
        known = fit_modules(self._work.model)
        found: dict[str, Tensor] = {}
        for place in group.slices:
            path, _, tensor = place.tensor.rpartition(".")
            if place.is_consumer and path in known and tensor == "weight" and place.axis == 1:
                found[path] = torch.cat([found[path], place.index], 1) if path in found else place.index
        return found

    def _views(self, places: Mapping[str, Tensor], dense: Mapping[str, Samples]) -> list[View]:
        modules = fit_modules(self._work.model)
        now = self._samples(self._work.model, list(places))
        return [
            View(Samples(now[path].inputs, dense[path].outputs), modules[path], columns_of(modules[path], index.cpu()))
            for path, index in places.items()
        ]

    def _samples(self, model: torch.nn.Module, paths: list[str]) -> dict[str, Samples]:
        return sampled(model, paths, self._calibration(), self.settings.rows, self._work.settings.train.seed)

    def _calibration(self) -> list[Any]:
        """The same inputs in all steps; they are counted once, however often a run is taken up again."""
        if self._batches is None:
            stream = self._work.stream
            counted = None if self._place is None else stream.state()
            fork = stream.fork()
            fork.rank = 0  # all processes must decide alike, so they look at the same batches
            if self._place is None:
                self._place = fork.state()
            else:
                fork.restore(self._place)
            self._batches = [next(fork)[0] for _ in range(self.settings.batches)]
            if counted is not None:
                stream.restore(counted)
        return self._batches

    # ------------------------------------------------------------ the threshold

    def _score(self) -> float:
        with in_evaluation(self._work.model):
            return float(self._work.held_out(self._work.model))

    def _too_low(self, score: float) -> bool:
        if self._dense_score is None:
            with in_evaluation(self._dense):
                self._dense_score = float(self._work.held_out(self._dense))
        assert self.settings.max_drop is not None  # or the threshold would have been given up
        return not score >= self._dense_score - self.settings.max_drop  # a score that is no number is too low

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Where it is in its pass."""
        return {
            "place": self._place,
            "passes": self._passes,
            "share": self._share,
            "queue": list(self._queue),
            "closed": list(self._closed),
            "dense_score": self._dense_score,
            "gave_up": self._gave_up,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts it back."""
        self._batches = None
        self._place = None if state["place"] is None else {name: int(value) for name, value in state["place"].items()}
        self._passes, self._share = int(state["passes"]), float(state["share"])
        self._queue, self._closed = [str(name) for name in state["queue"]], [str(name) for name in state["closed"]]
        self._dense_score = None if state["dense_score"] is None else float(state["dense_score"])
        self._gave_up = bool(state["gave_up"])
