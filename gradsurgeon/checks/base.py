"""The facts that a check receives, and the findings that it returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """

    cause: str
    text: str
    tensors: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


Later = Callable[[Tensor, Callable[[Tensor], Iterable[Finding]]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A backward pass, before and after it runs.

    Attributes:
        step: the number of the update that it feeds.
        tensors: the parameters that it reached; none are known before it runs.
        params: all parameters of the rule.
        strangers: trained leaves that it reached and that belong to no model of a session.
        loss: the value that the pass began from, detached; ``None`` if it was not one number.
        loss_made_by: the operation that computed it, as ``nll_loss``; empty if unknown.
        norms: the norms of the gradients after it, if they were measured anyway.
        evaluated: whether all modules of the last forward pass were in evaluation mode; ``None`` if unknown.
        later: calls a function with values on the host, once they have arrived there, and tells what it finds.
    """

    step: int
    tensors: Sequence[int]
    params: Mapping[int, Tensor]
    later: Later
    strangers: Sequence[Tensor] = ()
    loss: Tensor | None = None
    loss_made_by: str = ""
    norms: Sequence[Tensor] = ()
    evaluated: bool | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """An update of one optimizer, before and after it takes place.

    Attributes:
        owner: stands for the optimizer; hashable.
        step: the number of the update.
        tensors: the parameters of the rule that the optimizer owns, or that no optimizer owns.
        params: these parameters, with their gradients in `grad`; the local part of a sharded one.
        group: by parameter, its group of the optimizer; parameters that no optimizer owns are missing.
        state: by parameter, its state in the optimizer.
        kinds: by parameter, the class name of the module that holds it.
        later: calls a function with values on the host, once they have arrived there, and tells what it finds.
        took_place: whether the optimizer was allowed to update; known after the update.
        frozen: the parameters that a `freeze` rule hid, by the rule's id.
        scale: the loss scale that the gradients still carry before the update; ``None`` if they carry none.
        mail: reaches the ranks that train replicas; ``None`` if there are none.
    """

    owner: Hashable
    step: int
    tensors: Sequence[int]
    params: Mapping[int, Tensor]
    group: Mapping[int, Mapping[str, Any]]
    state: Mapping[int, Mapping[str, Any]]
    later: Later
    kinds: Mapping[int, str] = field(default_factory=dict)
    took_place: bool = True
    frozen: Mapping[int, str] = field(default_factory=dict)
    scale: float | None = None
    mail: Mail | None = None


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
        """Send bytes for the first of the ranks."""

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

    def before_update(self, update: Update) -> Iterable[Finding]:
        """Look at gradients and weights right before an update, before rules at `step` act."""
        del update
        return ()

    def after_update(self, update: Update) -> Iterable[Finding]:
        """Look at gradients and weights right after an update."""
        del update
        return ()
