"""The facts that a check receives, and the findings that it returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.tensors import _dist, _numbers
from gradsurgeon.tensors.backward_graph import BackwardGraph, LossNode, PassKey

# Modules that compute something else in evaluation mode.
_MODAL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)  # noqa: SLF001 # their public base classes


@dataclass(frozen=True, slots=True)
class LossSource:
    """An operation of a loss that a finding blames, by its place among the nodes; with a diagnosis if it made NaN or Inf.

    ``pass_key`` recognises its pass among those of an update; empty for the pass that is about to begin.
    """

    nodes: Sequence[LossNode]
    place: int
    diagnosis: Diagnosis | None = None
    pass_key: PassKey = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: its place, what was seen, and the remedy.

    Attributes:
        cause: a word for the kind of fault; the same cause is reported once for each tensor.
        text: one sentence or two, with ``{names}`` where the names belong, and ``{it}`` for it or them.
        indices: the parameters that it concerns, as numbers of the session; none if it concerns the whole model.
        names: other names, for tensors that are not in the model.
        step: the step in which it happened, if that is not the step in which it is reported.
        source: the operation of a loss that it blames, ``None`` if it blames none.
        is_fact: whether it may be meant: then it stands among the facts of the summary, and is no fault.
    """

    cause: str
    text: str
    indices: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    step: int | None = None
    source: LossSource | None = None
    is_fact: bool = False


Findings = Iterable[Finding]


class Model:
    """A model, reached weakly; ``holders`` has the module that holds each parameter."""

    def __init__(self, root: nn.Module, holders: Mapping[int, nn.Module]) -> None:
        self.root = weakref.ref(root)
        self._holders = weakref.WeakValueDictionary(holders)
        modal = [each for each in root.modules() if isinstance(each, _MODAL)]
        self._modal = weakref.WeakSet(modal)
        self._has_modes = bool(modal)
        # Maps each parameter to the name of the class of its module.
        self.kinds = {index: type(holder).__name__ for index, holder in holders.items()}

    def is_evaluated(self) -> bool | None:
        """Tell whether the model is in evaluation mode; ``None`` if it computes the same in both modes."""
        root = self.root()
        if root is None or not self._has_modes:
            return None
        return not root.training and not any(module.training for module in self._modal)

    def modal_names(self) -> list[str]:
        """Return the modules that compute something else in evaluation mode; a dropout of probability 0 does not."""
        root = self.root()
        if root is None:
            return []
        names = []
        for name, module in root.named_modules():
            if isinstance(module, _MODAL) and vars(module).get("p", 1):
                names.append(name)
        return names

    def is_resting(self, index: int) -> bool:
        """Tell whether a parameter belongs to a part that alone is in evaluation mode."""
        root = self.root()
        holder = self.holder(index)
        is_trained = root is not None and root.training
        return is_trained and holder is not None and not holder.training

    def holder(self, index: int) -> nn.Module | None:
        """Return the module that holds a parameter, ``None`` if it is gone."""
        return self._holders.get(index)

    def idle_branches(self, dead: Collection[int]) -> set[int]:
        """Return those of some parameters that are in a list of modules, as experts and heads, of which others live."""
        root = self.root()
        idle: set[int] = set()
        if root is None:
            return idle
        for branches in root.modules():
            if isinstance(branches, nn.ModuleList | nn.ModuleDict):
                children = [*branches.children()]
                dead_parts = []
                for branch in children:
                    part = self._indices_in(branch)
                    if part.issubset(dead):
                        dead_parts.append(part)
                if len(dead_parts) < len(children):
                    idle.update(*dead_parts)
        return idle

    def _indices_in(self, module: nn.Module) -> set[int]:
        inside = set(map(id, module.modules()))
        indices = set()
        for index, holder in self._holders.items():
            if id(holder) in inside:
                indices.add(index)
        return indices


# Returns parameters by their numbers.
Find = Callable[[Sequence[int]], Sequence[Tensor | None]]
Missed = Literal["bypassed", "twice", "alone", "alone at last", "unknown"]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Parameters of one update that several ranks hold alike, or may hold alike.

    Attributes:
        key: a name for these parameters that all of these ranks use.
        indices: the parameters, as numbers of the session.
        ranks: the ranks, ascending.
        passes: the passes that `DistributedDataParallel` averaged so far, and the passes since then, alike on all ranks.
        promised: whether `DistributedDataParallel` keeps them alike; otherwise only their gradients can show it.
        missed: by parameter, why its last gradient was not averaged: the forward pass went around the wrapper, a second
            pass used one forward pass of the wrapper, it ran under `no_sync` (also after a pass that was averaged), or the
            wrapper does not know it.
    """

    key: str
    indices: Sequence[int]
    ranks: Sequence[int]
    passes: tuple[int, int]
    promised: bool = False
    missed: Mapping[int, Missed] = field(default_factory=dict)


@dataclass(eq=False)
class Moment:
    """A moment of a training, for one rule.

    Attributes:
        step: the number of the update, or of the update that a backward pass feeds.
        members: the parameters of the rule.
        model: the model.
        find: returns parameters by their numbers, ``None`` for those that are gone.
        find_weights: the same for the tensors that the optimizer updates, if they are others.
        find_grads: returns those of some parameters that have a gradient now, and the gradients.
        later: calls a function with values on the host, once they have arrived there, and tells what it finds.
    """

    step: int
    members: Sequence[int]
    model: Model
    find: Find
    find_weights: Find
    find_grads: Callable[[Sequence[int]], tuple[Sequence[int], Sequence[Tensor]]]
    later: Callable[[Tensor, Callable[[Tensor], Iterable[Finding]]], None]

    @cached_property
    def params(self) -> Mapping[int, Tensor]:
        """The parameters of the rule. Of a sharded one only the local part is there."""
        return _local_parts(self._held(self.find_weights))

    @cached_property
    def originals(self) -> Mapping[int, Tensor]:
        """The parameters of the rule as the script has them."""
        return self._held(self.find)

    @cached_property
    def grads(self) -> Mapping[int, Tensor]:
        """The gradients that are there now."""
        return _local_parts(dict(zip(*self.find_grads(self.members), strict=True)))

    def _held(self, find: Find) -> dict[int, Tensor]:
        params = zip(self.members, find(self.members), strict=True)
        return {index: param for index, param in params if param is not None}

    def is_any(self, indices: Iterable[int]) -> bool:
        """Tell whether one of some gradients has an element other than 0. Waits for the device."""
        grads = self.grads
        for index in indices:
            if index in grads and bool(_numbers.values(grads[index]).any()):
                return True
        return False

    def has_finite_grad(self, index: int) -> bool:
        """Tell whether all elements of a gradient are finite. Waits for the device."""
        return bool(_numbers.values(self.grads[index]).isfinite().all())


def _local_parts(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    if set(map(type, tensors.values())) <= _dist.PLAIN:  # nearly always
        return tensors
    parts = {}
    for index, tensor in tensors.items():
        part = _dist.local(tensor)
        # A rank without an element of a flattened tensor can judge nothing of it.
        if not _dist.is_empty(tensor):
            parts[index] = part
    return parts


@dataclass(eq=False)
class Pass(Moment):
    """A backward pass, right before and right after it runs.

    Attributes:
        reached: the parameters of the session that it reached; none before it.
        graph: its graph, if it is known.
        unregistered: returns the trained leaves that it reached, and that are no parameters of the model.
        source_in_loss: returns the operation that made its loss NaN or Inf, ``None`` if none shows.
        inputs: returns samples of the inputs of the last call of the model, none if calls are not known.
        scale: the scale of a `GradScaler` on the gradients of the pass, 0-dim; ``None`` without one. Known after the pass.
    """

    reached: Collection[int]
    graph: BackwardGraph | None
    unregistered: Callable[[], Sequence[Tensor]]
    source_in_loss: Callable[[], LossSource | None] = lambda: None
    inputs: Callable[[], Sequence[Tensor]] = tuple
    scale: Tensor | None = None

    @property
    def indices(self) -> Sequence[int]:
        """The parameters of the rule that it reached."""
        reached = set(self.reached)
        return [index for index in self.members if index in reached]

    def reaches(self, indices: Collection[int]) -> bool:
        """Tell whether it reached one of some parameters."""
        return not set(indices).isdisjoint(self.reached)

    @property
    def loss(self) -> Tensor | None:
        """The value that the pass began from, detached; ``None`` if it was not one number."""
        if self.graph is None:
            return None
        return self.graph.loss


@dataclass(eq=False)
class Update(Moment):
    """An update of one optimizer, right before and right after it takes place.

    Attributes:
        indices: the parameters of the rule that the optimizer owns, or that none owns.
        owner: a value that stands for the optimizer.
        optimizer: the optimizer, ``None`` if the script updates by hand.
        evaluations: how often the model has been called in evaluation mode without gradients; ``None`` if unknown.
        topic: the topic of the channels to other ranks; known before edits.
        find_replicas: returns which of some parameters other ranks hold as well; known before edits.
        scale: the loss scale that the gradients still carry; ``None`` if they carry none.
        by_scaler: whether a `GradScaler` steps the optimizer; known before the update.
        has_moved: whether the optimizer has moved weights already, and evaluates its closure where they are now.
        when_known: calls a function with whether the optimizer was allowed to update: after the update at once, unless
            only a device knows.
        frozen: by parameter that a `freeze` rule hid, the id of the rule; known after the update.
        known_norms: returns the norms that a trap has just measured, if one has.
    """

    indices: Sequence[int]
    owner: Hashable
    optimizer: Optimizer | None
    evaluations: int | None
    topic: str = ""
    find_replicas: Callable[[Sequence[int]], Sequence[Replicas]] = lambda _: ()
    scale: float | None = None
    by_scaler: bool = False
    has_moved: bool = False
    when_known: Callable[[Callable[[bool], object]], object] = lambda act: act(
        True
    )  # the common case
    frozen: Mapping[int, str] = field(default_factory=dict)
    known_norms: Callable[[Sequence[int]], Tensor | None] = lambda _: None

    @cached_property
    def groups(self) -> Mapping[int, Mapping[str, Any]]:
        """By parameter, the group of the optimizer that has it."""
        by_id: dict[int, Any] = {}
        for group in getattr(self.optimizer, "param_groups", ()):
            for param in group["params"]:
                by_id[id(param)] = group
        groups = {}
        for index, param in zip(self.indices, self.find(self.indices), strict=True):
            if id(param) in by_id:
                groups[index] = by_id[id(param)]
        return groups

    def state_of(self, index: int) -> Mapping[str, Any]:
        """Return what the optimizer keeps for a parameter."""
        states: Mapping[Any, Mapping[str, Any]] = getattr(self.optimizer, "state", {})
        return states.get(self.originals.get(index), {})

    @cached_property
    def replicas(self) -> Sequence[Replicas]:
        """The parameters of an optimizer that other ranks hold as well."""
        return self.find_replicas([index for index in self.indices if index in self.groups])

    def norms(self, indices: Sequence[int]) -> Tensor:
        """Return the norms of gradients on one device."""
        known = self.known_norms(indices)
        if known is not None:
            return known
        return _numbers.norms([self.grads[index] for index in indices])


class Check:
    """Looks at a training and returns findings. It changes nothing. Each method may be left out.

    Each runs under `torch.no_grad()`.
    """

    # A check that compares ranks has nothing to look at in one process.
    compares_ranks = False

    def rests(self, method: str) -> bool:  # noqa: ARG002 # of derived checks
        """Return whether a method before a pass or an update would see nothing now."""
        return False

    def before_pass(self, starting: Pass) -> Iterable[Finding]:  # noqa: ARG002 # of derived checks
        """Look at gradients and weights right before a backward pass."""
        return ()

    def after_pass(self, done: Pass) -> Iterable[Finding]:  # noqa: ARG002 # of derived checks
        """Look at a backward pass that has ended."""
        return ()

    def before_unscaling(self, update: Update) -> Iterable[Finding]:  # noqa: ARG002 # of derived checks
        """Look at gradients that a `GradScaler` is about to unscale, because the script has not."""
        return ()

    def before_update(self, update: Update) -> Iterable[Finding]:  # noqa: ARG002 # of derived checks
        """Look at gradients and weights right before an update, before rules at `step` act."""
        return ()

    def before_edits(self, update: Update) -> Iterable[Finding]:  # noqa: ARG002 # of derived checks
        """Look at gradients once the traps have judged them, before rules at `step` act."""
        return ()

    def after_update(self, update: Update) -> Iterable[Finding]:  # noqa: ARG002 # of derived checks
        """Look at gradients and weights right after an update."""
        return ()

    def close(self) -> None:
        """Take off what the check has put on the model. The session has ended."""

    def at_end(self) -> Iterable[Finding]:
        """Return what has not been reported when the session, or its process group, ends."""
        return ()


def owned_ids(optimizer: Optimizer | None) -> set[int]:
    """Return the ids of the parameters of an optimizer."""
    ids: set[int] = set()
    for group in getattr(optimizer, "param_groups", ()):
        ids.update(map(id, group["params"]))
    return ids


def param_ids(module: nn.Module) -> set[int]:
    """Return the ids of the parameters of a module."""
    return set(map(id, module.parameters()))
