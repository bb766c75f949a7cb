"""What was kept of a step: enough to run the calls of the model again, should it go wrong."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradsurgeon import _torch
from gradsurgeon.distributed.fully_shard import Cast
from gradsurgeon.tensors.backward_graph import BackwardGraph, LossNode
from gradsurgeon.tensors.structure import Path

# A loss has few nodes.
_MOST_NODES = 64
# So many elements tell whether a replay has made the same.
_SAMPLE, _SMALL = 256, 1024


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """A fixed sample of a tensor, by which it is known again. It stays on its device, unread.

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
                # A copy of all of it would cost too much: the last row stands for it.
                while part.dim() > 1:
                    part = part[-1]
            part = part.reshape(-1)[:: max(1, part.numel() // _SAMPLE)].clone()
        elif part.layout == torch.strided and part.untyped_storage().nbytes() > part.nbytes:
            part = part.clone()  # It would hold all that it is a part of.
        return cls(shape, part, _torch.writes(part))

    @property
    def is_overwritten(self) -> bool:
        """Whether the script has written into it since."""
        return _torch.writes(self.sample) != self.version

    def is_like(self, other: Fingerprint) -> bool:
        """Tell whether another tensor has the same elements, as far as the samples tell, and what is not finite in them."""
        if self.shape != other.shape or self.sample.dtype != other.sample.dtype:
            return False
        return torch.equal(self.sample.nan_to_num(7.0), other.sample.nan_to_num(7.0))


@dataclass(frozen=True, slots=True)
class HostRandom:
    """State of the random numbers of Python, and of those of numpy where it is in use."""

    python: tuple[Any, ...] | None = None
    numpy: Mapping[str, Any] | None = None

    @classmethod
    def now(cls) -> HostRandom:
        return cls(random.getstate(), _state_of_numpy())

    @property
    def nbytes(self) -> int:
        return 36 * (0 if self.python is None else len(self.python[1])) + (
            0 if self.numpy is None else _MT19937_BYTES
        )

    def set(self) -> None:
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None and (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.set_state(self.numpy)


# The state of numpy that was read last, with the memory that it was read from.
_read: tuple[bytes, Mapping[str, Any]] | None = None
_MT19937_BYTES = 4 * 625


def _state_of_numpy() -> Mapping[str, Any] | None:
    """Return the state of the random numbers of numpy, read anew only where some were drawn: that takes long."""
    global _read  # noqa: PLW0603 # as the random numbers are there once
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    generator = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    if generator is None or type(generator).__name__ != "MT19937":
        state: Mapping[str, Any] = numpy.get_state(legacy=False)
        return state
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    # A normal number that waits is kept elsewhere, and taking it moves nothing here.
    if _read is None or _read[0] != memory or _read[1]["has_gauss"]:
        _read = memory, numpy.get_state(legacy=False)
    return _read[1]


class Buffers:
    """Copies of buffers, those alike in one tensor: a forward pass may change hundreds of small ones."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._alone: dict[str, Tensor] = {}
        kinds: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, buffer in buffers.items():
            part = buffer.detach()
            if part.layout == torch.strided and part.is_contiguous() and not part.is_quantized:
                kinds.setdefault((part.device, part.dtype), {})[name] = part
            else:
                self._alone[name] = part.clone()
        self._together = [
            (
                [(name, part.shape) for name, part in named.items()],
                # That of a lone one would stay where it is.
                _torch.flattened(list(named.values()))
                if len(named) > 1
                else next(iter(named.values())).clone().view(-1),
            )
            for named in kinds.values()
        ]

    @property
    def nbytes(self) -> int:
        parts = (*self._alone.values(), *(flat for _, flat in self._together))
        return sum(part.numel() * part.element_size() for part in parts)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._alone.items()
        for named, flat in self._together:
            parts = torch.split(flat, [shape.numel() for _, shape in named])
            for (name, shape), part in zip(named, parts, strict=True):
                yield name, part.view(shape)


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptCall:
    """One call of a model in training.

    Attributes:
        module: what was called, reached weakly.
        name: its name in the model of the session.
        args: positional arguments, tensors by reference, in copies of the containers of the script.
        kwargs: arguments by keyword, the same.
        written: how often each tensor among the arguments had been written to.
        random: state of the random numbers of torch on the host, and by device.
        buffers: copies from before the call of those that it changes, by name in ``module``.
        autocast: by kind of device, whether autocast was on and its dtype.
        outputs: what came out, by path.
        grads: the gradients that came back, by path; those of a `GradScaler` are scaled.
        last_node: the number of the last node of the graph that led to an output.
        number: which backward pass of the step has come back to it first, from 1; 0 before one has.
        bytes: of all that is kept.
        weights: those of the time, by name in ``module``, where it may have others by now.
        training: by name, whether each module was in training, where that may have changed.
        compiled: whether compiled code was run.
        host: state of the random numbers of Python and numpy.
        differentiated: whether `torch.autograd.grad` went through it and made a graph, as for a gradient penalty.
        iterators: the types of the iterators among the arguments, which a replay would take from the script.
        casts: by name of a module, what `fully_shard` does around its forward pass, where its hooks are off.
    """

    module: Callable[[], nn.Module | None]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: dict[Path, int]
    random: dict[str, Tensor]
    buffers: Buffers
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
    differentiated: bool = False
    iterators: tuple[str, ...] = ()
    casts: Mapping[str, Cast] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class KeptLoss:
    """How a loss was made of what came out of a model, by reference.

    Attributes:
        value: of the loss, if it is one number.
        nodes: of its graph, the first made first.
    """

    value: Tensor | None
    nodes: Sequence[LossNode]
    bytes: int = 0

    @classmethod
    def of(cls, graph: BackwardGraph, after: int) -> KeptLoss:
        """Return that of a graph, from the nodes on that were made after the one with a number."""
        nodes = graph.nodes_after(after, _MOST_NODES)
        size = 0
        for node in nodes:
            for kept in node.saved.values():
                # Some keep several in a tuple.
                for tensor in kept if isinstance(kept, tuple) else (kept,):
                    size += tensor.nbytes if isinstance(tensor, Tensor) else 0
        return cls(graph.loss, nodes, size)


@dataclass(frozen=True, slots=True, eq=False)
class FailedStep:
    """A step that a trap has stopped, and what it takes to find out why.

    Attributes:
        calls: those of the model that fed it, as far as they were kept.
        dropped: how many were not.
        problem: why not, if that was not for their size.
        bad: the parameters whose gradients are not finite at the update, as far as a trap watches them.
        passes: backward passes that it had.
        step: its number.
        rank: of this process.
        scale: what a `GradScaler` had multiplied the loss by.
        modules: those whose tensors a trap found non-finite, where it watches modules.
        rested: rules that edit what passes through modules, and rest in a replay.
        losses: by backward pass, from 1, what its loss was made of outside of the model.
        together: whether all ranks run it again at the same time, each its part, with whole parameters.
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
