"""One model of a script, the session on it, and whether anybody has updated it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradsurgeon import _dist, _torch, planning
from gradsurgeon.planning import Plan
from gradsurgeon.runtime import Attachment

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        provisional: a backward pass reached it, and nobody has updated it yet.
        begun: training has begun, and its header is written.
        replaced: another one has taken its place, with all of its parameters.
        reached: the last backward pass reached it, while it was provisional.
        checksums: those of its weights before that pass.
    """

    title: str
    module: weakref.ref[nn.Module]
    plan: Plan
    session: Attachment
    record: str
    rank: int
    observing: bool
    start: int
    provisional: bool
    begun: bool = False
    replaced: bool = False
    reached: bool = False
    checksums: dict[str, int] = field(default_factory=dict)

    @property
    def is_waiting(self) -> bool:
        """Whether an optimizer has it, and its training has not begun."""
        return not (self.begun or self.provisional)

    def params(self) -> list[nn.Parameter]:
        """Return the parameters of the model, none once it is gone."""
        module = self.module()
        return [] if module is None else list(module.parameters())

    def remember_weights(self) -> None:
        if (module := self.module()) is not None:
            self.checksums = _checksums(module)

    def is_updated(self) -> bool:
        """Return whether somebody has written to the weights since they were remembered."""
        if (module := self.module()) is None:
            return False
        now = _checksums(module)
        return any(now.get(name, before) != before for name, before in self.checksums.items())

    def bound_ids(self) -> set[int]:
        """Return the ids of the parameters that the rules were bound to."""
        names = {name for param in self.plan.manifest.params for name in param.names}
        return {
            id(slot.owner._parameters[slot.key])  # noqa: SLF001 # the slot itself
            for slot in planning.slots(self.module())
            if slot.name in names
        }


def _checksums(module: nn.Module) -> dict[str, int]:
    """Return a number for each parameter that changes with any bit of it. Waits for the device."""
    if _torch.is_capturing():
        return {}  # Nothing can be read while a CUDA graph is recorded.
    with torch.no_grad():
        return {name: _checksum(_dist.local(param)) for name, param in module.named_parameters()}


def _checksum(param: Tensor) -> int:
    if param.is_complex():
        param = torch.view_as_real(param)
    dtype = _INTEGERS.get(param.element_size())
    if param.is_meta or param.layout is not torch.strided or dtype is None:
        # Writing by way of `.data` is not seen then.
        return param._version  # noqa: SLF001 # the documented way to see in-place writes
    return int(param.view(dtype).sum(dtype=torch.int64))
