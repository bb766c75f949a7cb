"""The parts of a training step that are kept, so that the calls of the model can be run again if it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon.actions import spelled
from gradsurgeon.forensics.undisturbed import RandomState
from gradsurgeon.language.planning.manifest import class_names
from gradsurgeon.tensors import _dist, _numbers, _torch
from gradsurgeon.tensors.backward_graph import UNREAD, BackwardGraph, LossNode, PassKey
from gradsurgeon.tensors.readable import readable
from gradsurgeon.tensors.sampling import SAMPLE, sample
from gradsurgeon.tensors.structure import Path, parameters_of, tensors_in

# The beginning of the names of inputs beside those of parameters.
INPUT = "input "
# Shape and a fixed sample of a tensor, to recognise the tensor by. The sample stays on its device, unread.
Fingerprint = tuple[tuple[int, ...], Tensor]
# The bounds on one step: beyond them the oldest calls are dropped first.
MAX_BYTES = 256 * 2**20
MOST_CALLS = 256
_NUMBERS = frozenset({int, float, bool, type(None)})
# The last operations of a longer loss are kept, and those of so many older ones that may make NaN.
_MOST_NODES = 64
_MOST_OLDER = 1024


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """Return what recognises a tensor, ``None`` if the tensor cannot be read.

    A small tensor is its own sample, unless a view would keep a larger one alive.
    """
    held = readable(tensor)
    if held is None:
        return None
    part = _numbers.values(held)
    shape = tuple(tensor.shape)
    if part.numel() <= SAMPLE and part.untyped_storage().nbytes() == part.nbytes:
        return shape, part.flatten()
    return shape, sample(part)


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptCall:
    """One call of a model in training, with all that a replay needs: tensors by reference, containers as copies.

    Attributes:
        grads: the gradients of the outputs, by path; under a `GradScaler` they are scaled.
        first_node: the number of the first node of the graph that the call could make.
        last_node: the number of the last node that led to an output.
        numbers: the backward passes of the step that reached the call, from 1.
        weights: weights and buffers at that time, by name in ``module``, if the module may have others now.
        iterators: the types of iterators among the arguments, which a replay would take from the script.
        sample_ids: the numbers of its samples, integers of shape [n], if the script tagged some.
    """

    module: Callable[[], nn.Module | None]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    buffers: Mapping[str, Tensor]
    autocast: dict[str, tuple[bool, torch.dtype]]
    outputs: dict[Path, Fingerprint] = field(default_factory=dict)
    versions: dict[Path, int] = field(default_factory=dict)
    grads: dict[Path, Tensor] = field(default_factory=dict)
    first_node: int = 0
    last_node: int = 0
    numbers: list[int] = field(default_factory=list)
    bytes: int = 0
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    training: Mapping[str, bool] = field(default_factory=dict)
    compiled: bool = False
    iterators: tuple[str, ...] = ()
    sample_ids: Tensor | None = None

    @property
    def number(self) -> int:
        """The first pass that reached the call; 0 before one has."""
        return next(iter(self.numbers), 0)

    @property
    def prefix(self) -> str:
        """What comes before the names of its module in those of the model; nothing for the root, whose name is a dot."""
        return f"{self.name}.".lstrip(".")

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors among the arguments by name: ``x``, or ``batch.image[0]``; none if the module is gone."""
        tensors: dict[str, Tensor] = {}
        module = self.module()
        if module is not None:
            for path, tensor in tensors_in([self.args, self.kwargs]):
                tensors[_input_name(module, path)] = tensor
        return tensors

    @property
    def first_input(self) -> Tensor:
        return next(iter(self.inputs.values()))

    def forget_overwritten(self) -> None:
        """Drop the outputs that the script has written to since: no replay can be compared with them."""
        for path, (_, sampled) in list(self.outputs.items()):
            if _torch.writes(sampled) != self.versions[path]:
                del self.outputs[path]


@dataclass(frozen=True, slots=True, eq=False)
class KeptLoss:
    """The nodes from the outputs of a model to a loss, in the order in which they were made; the loss if it is one number.

    ``has_model`` tells whether the nodes of the model are among them, because it returned no tensor. ``pass_key``
    recognises its pass among those of an update.
    """

    value: Tensor | None
    nodes: Sequence[LossNode]
    bytes: int = 0
    has_model: bool = False
    pass_key: PassKey = ()


@dataclass(slots=True, eq=False)
class KeptStep:
    """The calls of a model that feed one update, oldest first, and the losses outside of it by backward pass, from 1.

    Attributes:
        dropped: how many calls were not kept.
        problem: why not, if their size was not the reason.
        updated: whether an update came after the calls, and another one may.
        earlier: the step before, as long as the host does not know whether the device left it out; it shares the bound.
        later: calls after the step, if it was held meanwhile.
    """

    calls: list[KeptCall] = field(default_factory=list)
    losses: dict[int, KeptLoss] = field(default_factory=dict)
    dropped: int = 0
    problem: str = ""
    passes: int = 0
    updated: bool = False
    earlier: KeptStep | None = None
    later: Sequence[KeptCall] = ()

    @property
    def bytes(self) -> int:
        total = 0
        if self.earlier is not None:
            total = self.earlier.bytes
        for call in self.calls:
            total += call.bytes
        for loss in self.losses.values():
            total += loss.bytes
        return total

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors among the arguments of the calls, by name and call."""
        tensors = {}
        for number, call in enumerate(self.calls, 1):
            for name, tensor in call.inputs.items():
                if len(self.calls) > 1:
                    name += f" of call {number}"  # noqa: PLW2901 # a longer name
                tensors[f"{INPUT}{name}"] = tensor
        return tensors

    def keep_loss(self, graph: BackwardGraph, pass_key: PassKey) -> None:
        """Keep the loss of the next pass, if there is room: a diagnosis needs the calls more than the loss."""
        # A part of the loss, such as a gradient penalty, may come before another call.
        spans = [(call.first_node, call.last_node) for call in self.calls]
        before = (0, self.calls[0].first_node - 1)
        nodes = graph.last_nodes(_MOST_NODES, [before, *spans], older=_MOST_OLDER)
        room = MAX_BYTES - self.bytes
        size = 0
        # A loss that is too large keeps the tensors of its last operations.
        for node in reversed(nodes):
            saved = _bytes_of(node)
            if size + saved > room:
                node.saved = {UNREAD: True}
            else:
                size += saved
        self.losses[self.passes + 1] = KeptLoss(
            graph.loss, nodes, size, has_model=not any(last for _, last in spans), pass_key=pass_key
        )

    def shorten(self) -> None:
        if self.bytes <= MAX_BYTES and len(self.calls) <= MOST_CALLS:
            return
        if self.bytes > MAX_BYTES and self.earlier is not None:
            self.earlier.losses.clear()
            self.earlier.drop_oldest(len(self.earlier.calls))
        if self.bytes > MAX_BYTES:
            self.losses.clear()
        while self.calls and (len(self.calls) > MOST_CALLS or self.bytes > MAX_BYTES):
            self.drop_oldest(1)

    def drop_oldest(self, number: int) -> None:
        del self.calls[:number]
        self.dropped += number


@dataclass(frozen=True, slots=True, eq=False)
class FailedStep:
    """A step that a trap has stopped, with everything that a diagnosis needs.

    Attributes:
        modules: the modules with non-finite tensors, if a trap watches modules.
        bad: the watched parameters with non-finite gradients at the update.
        averaged: whether an engine has averaged the gradients over ranks before they were seen.
        rested: rules that edit tensors of modules, and do not act in a replay.
        written: weights and inputs that changed since, if the device decided and the host heard of it later.
    """

    kept: KeptStep
    step: int
    rank: int
    scale: float | None = None
    modules: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    rested: tuple[str, ...] = ()
    averaged: bool = False
    written: tuple[str, ...] = ()

    @property
    def has_moved(self) -> bool:
        """Whether a replay reads other numbers than the step did."""
        return self.kept.updated or bool(self.written)

    @property
    def called(self) -> dict[str, nn.Module]:
        modules = {}
        for call in self.kept.calls:
            module = call.module()
            if module is not None:
                modules[call.name] = module
        return modules

    @property
    def divided(self) -> bool:
        """Whether parameters are divided over ranks, so that no rank can run the step again alone."""
        for model in self.called.values():
            if any(map(_dist.is_divided, model.parameters())):
                return True
            # Between passes `fully_shard` may leave parameters whole, but gathers them in each forward pass.
            if any("FSDPModule" in class_names(module) for module in model.modules()):
                return True
        return False


def _bytes_of(node: LossNode) -> int:
    size = 0
    for value in node.saved.values():
        kind = type(value)
        if kind in _NUMBERS:  # nearly always
            continue
        # A tree of all values would be flattened in most of the time that keeping a loss takes.
        values = value if kind is tuple else (value,)
        for one in values:
            if isinstance(one, Tensor):
                size += one.nbytes
    return size


def _input_name(module: nn.Module, path: Path) -> str:
    # The path of a positional argument goes on with its number.
    _, first, *rest = path
    if isinstance(first, str):
        return f"{first}{spelled(rest)}"
    head = f"argument {first}"
    for param in parameters_of(module.forward)[first : first + 1]:
        if param.kind is not param.VAR_POSITIONAL:
            head = param.name
    return f"{head}{spelled(rest)}"
