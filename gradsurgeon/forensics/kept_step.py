"""The parts of a training step that are kept, so that the calls of the model can be run again if it fails."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon import _torch
from gradsurgeon.distributed.fully_shard import Cast
from gradsurgeon.tensors.backward_graph import BackwardGraph, LossNode
from gradsurgeon.tensors.structure import Path

# A graph with more nodes is another part of the model, not a loss.
_MOST_NODES = 64
# The elements by which two tensors are compared, and the largest tensor that is compared whole.
_SAMPLE, _SMALL = 256, 1024
_MT19937_BYTES = 4 * 625


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """A fixed sample of a tensor, to recognise the tensor by. It stays on its device, unread.

    A small tensor is its own sample, without a copy, unless it is a part of a larger one.
    """

    shape: tuple[int, ...]
    sample: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        part, shape = tensor.detach(), tuple(tensor.shape)
        if part.layout == torch.sparse_coo:
            part = part.coalesce().values()
        if part.numel() > _SMALL:
            if not part.is_contiguous():
                # A copy of the whole tensor would cost too much: its last row is sampled.
                while part.dim() > 1:
                    part = part[-1]
            part = part.reshape(-1)[:: max(1, part.numel() // _SAMPLE)].clone()
        elif part.layout == torch.strided and part.untyped_storage().nbytes() > part.nbytes:
            part = part.clone()  # The view would keep the whole tensor alive.
        return cls(shape, part, _torch.writes(part))

    @property
    def is_overwritten(self) -> bool:
        """Whether the script has written into the sample since."""
        return _torch.writes(self.sample) != self.version


def torch_random(devices: Iterable[str]) -> dict[str, Tensor]:
    """Return the random state of torch by device, ``cpu`` included."""
    states = {"cpu": torch.get_rng_state()}
    for device in {*devices} - {"cpu"}:
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


@dataclass(frozen=True, slots=True)
class HostRandom:
    """Random state of Python, and of numpy if the script uses numpy."""

    python: tuple[Any, ...] | None = None
    numpy: Mapping[str, Any] | None = None

    @classmethod
    def now(cls) -> HostRandom:
        return cls(random.getstate(), _state_of_numpy())

    @property
    def nbytes(self) -> int:
        python = 0 if self.python is None else 36 * len(self.python[1])
        return python + (0 if self.numpy is None else _MT19937_BYTES)

    def set(self) -> None:
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None and (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.set_state(self.numpy)


# The last state of numpy, with the memory that it was read from.
_read: tuple[bytes, Mapping[str, Any]] | None = None


def _state_of_numpy() -> Mapping[str, Any] | None:
    """Return the random state of numpy. Reading it takes long, so it is read again only if it has changed."""
    global _read  # noqa: PLW0603 # numpy has one state, too
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    generator = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    if generator is None or type(generator).__name__ != "MT19937":
        state: Mapping[str, Any] = numpy.get_state(legacy=False)
        return state
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    # numpy keeps a second normal number elsewhere, and drawing that changes nothing here.
    if _read is None or _read[0] != memory or _read[1]["has_gauss"]:
        _read = memory, numpy.get_state(legacy=False)
    return _read[1]


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptCall:
    """One call of a model in training.

    Attributes:
        module: the called module, reached weakly.
        name: its name in the model of the session.
        args: positional arguments: tensors by reference, in copies of the script's containers.
        kwargs: keyword arguments, likewise.
        written: how often each tensor among the arguments had been written to.
        random: random state of torch by device, ``cpu`` included.
        buffers: copies of the buffers that the call changes, from before it, by name in ``module``.
        autocast: by kind of device, whether autocast was on, and its dtype.
        outputs: the outputs, by path.
        grads: the gradients of the outputs, by path; under a `GradScaler` they are scaled.
        last_node: the number of the last node of the graph that led to an output.
        number: the first backward pass of the step that reached the call, from 1; 0 before one has.
        bytes: the size of all that is kept.
        weights: weights and buffers at that time, by name in ``module``, if the module may have others now.
        training: by name, whether each module was in training, if that may have changed.
        compiled: whether compiled code ran.
        host: random state of Python and numpy.
        iterators: the types of iterators among the arguments, which a replay would take from the script.
        casts: by module name, the casts of `fully_shard` around its forward pass, if its hooks are off.
    """

    module: Callable[[], nn.Module | None]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: dict[Path, int]
    random: dict[str, Tensor]
    buffers: Mapping[str, Tensor]
    autocast: dict[str, tuple[bool, torch.dtype]]
    outputs: dict[Path, Fingerprint] = field(default_factory=dict)
    grads: dict[Path, Tensor] = field(default_factory=dict)
    last_node: int = 0
    number: int = 0
    bytes: int = 0
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    training: Mapping[str, bool] = field(default_factory=dict)
    compiled: bool = False
    host: HostRandom = HostRandom()
    iterators: tuple[str, ...] = ()
    casts: Mapping[str, Cast] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The prefix of names inside the module: empty for the root."""
        return "" if self.name == "." else f"{self.name}."


@dataclass(frozen=True, slots=True, eq=False)
class KeptLoss:
    """The graph from the outputs of a model to a loss, with saved tensors by reference.

    Attributes:
        value: the loss, if it is one number.
        nodes: the nodes of its graph, in the order in which they were made.
    """

    value: Tensor | None
    nodes: Sequence[LossNode]
    bytes: int = 0

    @classmethod
    def of(cls, graph: BackwardGraph, after: int) -> KeptLoss:
        """Return the part of a graph that was made after the node with a number."""
        nodes = graph.nodes_after(after, _MOST_NODES)
        size = 0
        for node in nodes:
            for kept in node.saved.values():
                # Some nodes keep several tensors in a tuple.
                for tensor in kept if isinstance(kept, tuple) else (kept,):
                    size += tensor.nbytes if isinstance(tensor, Tensor) else 0
        return cls(graph.loss, nodes, size)


@dataclass(frozen=True, slots=True, eq=False)
class FailedStep:
    """A step that a trap has stopped, with everything that a diagnosis needs.

    Attributes:
        calls: the kept calls of the model that fed the step.
        dropped: how many calls were not kept.
        problem: why not, if their size was not the reason.
        passes: number of backward passes in the step.
        step: its number.
        rank: the rank of this process.
        scale: the factor of a `GradScaler`.
        modules: the modules with non-finite tensors, if a trap watches modules.
        rested: rules that edit tensors of modules, and do not act in a replay.
        losses: by backward pass, from 1, the loss outside of the model.
        bad: the watched parameters with non-finite gradients at the update.
        together: whether all ranks run the step again at the same time, with whole parameters.
        updated: whether another optimizer has updated weights since the calls.
    """

    calls: Sequence[KeptCall]
    dropped: int
    passes: int
    step: int
    rank: int
    scale: Tensor | None = None
    modules: tuple[str, ...] = ()
    rested: tuple[str, ...] = ()
    losses: Mapping[int, KeptLoss] = field(default_factory=dict)
    problem: str = ""
    bad: tuple[str, ...] = ()
    together: bool = False
    updated: bool = False
