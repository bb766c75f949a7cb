"""One model of a script, and the session on it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn

from gradsurgeon import planning
from gradsurgeon.planning import Plan
from gradsurgeon.runtime import Attachment


@dataclass(slots=True, eq=False)
class AttachedModel:
    """One model with rules on it.

    Attributes:
        title: class name of the model, with a number where there are several of a kind.
        module: reached weakly, as the session does.
        plan: what the rules bound to.
        session: the rules at work.
        record: its run directory, empty for none.
        rank: the rank of this process, kept for when its process group is gone.
        observing: nothing is edited.
        start: number of its first update.
        begun: training has begun, and its header is written.
        replaced: another one has taken its place, with all of its parameters.
    """

    title: str
    module: weakref.ref[nn.Module]
    plan: Plan
    session: Attachment
    record: str
    rank: int
    observing: bool
    start: int
    begun: bool = False
    replaced: bool = False

    def params(self) -> list[nn.Parameter]:
        """Return the parameters of the model, none once it is gone."""
        module = self.module()
        return [] if module is None else list(module.parameters())

    def bound_ids(self) -> set[int]:
        names = {name for param in self.plan.manifest.params for name in param.names}
        return {
            id(slot.owner._parameters[slot.key])  # noqa: SLF001 # the slot itself
            for slot in planning.slots(self.module())
            if slot.name in names
        }
