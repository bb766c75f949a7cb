"""The facts that a check receives, and the findings that it returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its place, what was seen, and the remedy.

    Attributes:
        cause: a word for the kind of fault; the same cause is told once for each tensor.
        text: one sentence or two, with ``{names}`` where the names belong, and ``{it}`` for it or them.
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
    """

    @property
    def step(self) -> int:
        """The number of the update, or of the update that a backward pass feeds."""

    @property
    def tensors(self) -> Sequence[int]:
        """The parameters of the rule that the optimizer owns, or that none owns; for a pass, those it reached."""

    @property
    def params(self) -> Mapping[int, Tensor]:
        """The parameters of the rule."""

    @property
    def grads(self) -> Mapping[int, Tensor]:
        """The gradients that are there now."""

    def later(self, values: Tensor, judge: Callable[[Tensor], Iterable[Finding]]) -> None:
        """Call ``judge`` with values on the host, once they have arrived there, and tell what it finds."""


class Pass(Moment, Protocol):
    """A backward pass, right before and right after it runs."""

    @property
    def loss(self) -> Tensor | None:
        """The value that the pass began from, detached; ``None`` if it was not one number."""

    @property
    def loss_made_by(self) -> str:
        """The operation that computed the loss, such as ``nll_loss``; empty if unknown."""

    def divisors(self) -> Sequence[Tensor]:
        """Return the numbers by which the loss was divided at last, before the pass; none after it."""

    @property
    def evaluated(self) -> bool | None:
        """Whether the model is in evaluation mode, as far as that matters to it; ``None`` if it does not."""

    def strangers(self) -> Sequence[Tensor]:
        """Return trained leaves that the pass reached, and that are no parameters of the model."""

    def is_homeless(self, leaf: Tensor) -> bool:
        """Return whether a leaf belongs to no module and no optimizer. Searches all objects: a tenth of a second."""


class Update(Moment, Protocol):
    """An update of one optimizer, right before and right after it takes place."""

    @property
    def owner(self) -> Hashable:
        """A value that stands for the optimizer."""

    @property
    def groups(self) -> Mapping[int, Mapping[str, Any]]:
        """By parameter, its group of the optimizer; parameters that no optimizer owns are missing."""

    @property
    def state(self) -> Mapping[int, Mapping[str, Any]]:
        """By parameter, its state in the optimizer."""

    @property
    def kinds(self) -> Mapping[int, str]:
        """By parameter, the class name of the module that holds it."""

    @property
    def apart(self) -> bool:
        """Whether the configuration of a model in it says that its embedding and its head are not tied."""

    @property
    def evaluations(self) -> int | None:
        """How often the model has been called in evaluation mode without gradients; ``None`` if unknown."""

    def is_resting(self, tensor: int) -> bool:
        """Return whether the module of a parameter is in evaluation mode while the model is in training mode."""

    def norms(self, tensors: Sequence[int]) -> Tensor:
        """Return the norms of gradients on one device; in `before_edits` those that a trap has just measured."""

    @property
    def took_place(self) -> bool:
        """Whether the optimizer was allowed to update; known after the update."""

    @property
    def frozen(self) -> Mapping[int, str]:
        """By parameter that a `freeze` rule hid, the id of the rule; known after the update."""

    @property
    def scale(self) -> float | None:
        """The loss scale that the gradients still carry; ``None`` if they carry none."""

    @property
    def mail(self) -> Mail | None:
        """Reaches the ranks that train replicas; ``None`` if there are none."""


class Mail(Protocol):
    """Exchanges bytes with the ranks that hold replicas of the parameters, waiting for nobody."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks, ascending."""

    @property
    def averaged(self) -> Collection[int]:
        """The parameters whose gradients `DistributedDataParallel` averages; empty without a wrapper."""

    @property
    def local(self) -> bool:
        """Whether the gradients of this update are meant for this rank alone, as in `no_sync`."""

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

    def before_edits(self, update: Update) -> Iterable[Finding]:
        """Look at gradients once the traps have judged them, before rules at `step` act."""
        del update
        return ()

    def after_update(self, update: Update) -> Iterable[Finding]:
        """Look at gradients and weights right after an update."""
        del update
        return ()
