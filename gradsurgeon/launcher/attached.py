"""One model of a script, and the session on it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn

from gradsurgeon import planning
from gradsurgeon.launcher.weights import Imprint, differ, imprint
from gradsurgeon.planning import Plan
from gradsurgeon.runtime import Attachment


@dataclass(slots=True, eq=False)
class Attached:
    """One model with rules on it.

    Attributes:
        title: class name of the model, with a number where there are several of a kind.
        model: reached weakly, as the session does.
        plan: what the rules bound to.
        session: the rules at work.
        record: its run directory, empty for none.
        rank: the rank of this process, kept for when its process group is gone.
        observing: nothing is edited.
        start: number of its first update.
        begun: training has begun, and its header is written.
        provisional: a backward pass reached it, and nobody has updated it yet.
        replaced: another one has taken its place, with all of its parameters.
        reached: the last backward pass reached it, while it was provisional.
        weights: what they were before that pass.
    """

    title: str
    model: weakref.ref[nn.Module]
    plan: Plan
    session: Attachment
    record: str
    rank: int
    observing: bool = False
    start: int = 0
    begun: bool = False
    provisional: bool = False
    replaced: bool = False
    reached: bool = False
    weights: Imprint = field(default_factory=dict)

    def params(self) -> list[nn.Parameter]:
        """Return the parameters of the model, none once it is gone."""
        model = self.model()
        return [] if model is None else list(model.parameters())

    def imprint(self) -> None:
        """Remember the weights as they are."""
        if (model := self.model()) is not None:
            self.weights = imprint(model)

    def is_updated(self) -> bool:
        """Tell whether somebody has written to the weights since."""
        return (model := self.model()) is not None and differ(self.weights, imprint(model))

    def bound(self) -> set[int]:
        """Return the ids of the parameters that the rules were bound to."""
        names = {name for param in self.plan.manifest.params for name in param.names}
        return {
            id(slot.owner._parameters[slot.key])  # noqa: SLF001 # the place itself
            for slot in planning.slots(self.model())
            if slot.name in names
        }
