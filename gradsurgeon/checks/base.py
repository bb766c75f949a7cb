"""The facts that a check receives, and the findings that it returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its place, what was seen, and the remedy.

    Attributes:
        cause: a word for the kind of fault; the same cause is told once for each tensor.
        text: one sentence or two, with ``{names}`` where the names belong.
        tensors: the parameters that it concerns, as numbers of the session; none if it concerns the whole model.
        names: other names, for tensors that are not in the model.
        step: the step in which it happened, if that is not the one in which it is told.
    """

    cause: str
    text: str
    tensors: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    step: int | None = None


class Moment(Protocol):
    """A moment of a training, for one rule.

    Tensors are looked up when they are asked for. Of a sharded parameter only the local part is there.

    Attributes:
        step: the number of the update, or of the update that a backward pass feeds.
        tensors: the parameters of the rule that the optimizer owns, or that none owns; for a pass, those it reached.
        params: the parameters of the rule.
        grads: the gradients that are there now.
    """

    step: int
    tensors: Sequence[int]
    params: Mapping[int, Tensor]
    grads: Mapping[int, Tensor]

    def later(self, values: Tensor, judge: Callable[[Tensor], Iterable[Finding]]) -> None:
        """Call ``judge`` with values on the host, once they have arrived there, and tell what it finds."""


class Pass(Moment, Protocol):
    """A backward pass, right before and right after it runs.

    Attributes:
        loss: the value that the pass began from, detached; ``None`` if it was not one number.
        loss_made_by: the operation that computed it, such as ``nll_loss``; empty if unknown.
        evaluated: whether the model is in evaluation mode, as far as that matters to it; ``None`` if it does not.
    """

    loss: Tensor | None
    loss_made_by: str
    evaluated: bool | None

    def strangers(self) -> Sequence[Tensor]:
        """Return trained leaves that the pass reached, and that belong to no module and no optimizer."""


class Update(Moment, Protocol):
    """An update of one optimizer, right before and right after it takes place.

    Attributes:
        owner: stands for the optimizer.
        groups: by parameter, its group of the optimizer; parameters that no optimizer owns are missing.
        state: by parameter, its state in the optimizer.
        kinds: by parameter, the class name of the module that holds it.
        took_place: whether the optimizer was allowed to update; known after the update.
        frozen: the parameters that a `freeze` rule hid, by the rule's id; known after the update.
        scale: the loss scale that the gradients still carry; ``None`` if they carry none.
        mail: reaches the ranks that train replicas; ``None`` if there are none.
    """

    owner: Hashable
    groups: Mapping[int, Mapping[str, Any]]
    state: Mapping[int, Mapping[str, Any]]
    kinds: Mapping[int, str]
    took_place: bool
    frozen: Mapping[int, str]
    scale: float | None
    mail: Mail | None


class Mail(Protocol):
    """Exchanges bytes with the ranks that hold replicas of the parameters, waiting for nobody.

    Attributes:
        rank: this rank.
        ranks: all ranks, ascending.
        averaged: whether `DistributedDataParallel` is known to average the gradients.
        local: whether the gradients of this update are meant for this rank alone, as in `no_sync`.
    """

    rank: int
    ranks: Sequence[int]
    averaged: bool
    local: bool

    def post(self, key: str, data: bytes) -> None:
        """Send bytes to the first of the ranks."""

    def take(self, key: str) -> Sequence[bytes] | None:
        """Return and remove what the other ranks have sent, in their order; ``None`` if not all have yet."""


class Check:
    """Looks at a training and returns findings. It changes nothing. Each method may be left out."""

    def before_pass(self, starting: Pass) -> Iterable[Finding]:
        """Look at gradients and weights right before a backward pass."""
        del starting
        return ()

    def after_pass(self, done: Pass) -> Iterable[Finding]:
        """Look at a backward pass that has ended."""
        del done
        return ()

    def before_unscaling(self, update: Update) -> Iterable[Finding]:
        """Look at gradients that a `GradScaler` is about to unscale, because the script has not."""
        del update
        return ()

    def before_update(self, update: Update) -> Iterable[Finding]:
        """Look at gradients and weights right before an update, before rules at `step` act."""
        del update
        return ()

    def after_update(self, update: Update) -> Iterable[Finding]:
        """Look at gradients and weights right after an update."""
        del update
        return ()
