"""What a replay can find to be the source of what is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from gradsurgeon.diagnosis import Cause, Line, TensorFacts

Kind = Literal["NaN", "Inf", "-Inf"]
KINDS: tuple[Kind, ...] = ("NaN", "Inf", "-Inf")
Direction = Literal["forward", "backward"]

_LOGARITHMS = ("aten.log", "aten.log2", "aten.log10", "aten.log1p")


@dataclass(frozen=True, slots=True)
class Call:
    """An operation and what it was given, to be repeated.

    Attributes:
        func: as the dispatcher has it.
        name: of the operation.
        args: as they were before it, where it has written over them.
        kwargs: the same.
        written: by identity of an earlier copy among these, the tensor that it has written over.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """The name without its namespace, and alike whether it writes in place."""
        return self.name.rpartition(".")[2].rstrip("_")


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What was not finite before any operation: a weight, an input, a gradient from outside, a number.

    ``intended`` of infinities that the script wrote: nobody is to blame for them.
    """

    when: int
    what: Literal[
        "weight", "buffer", "input", "loss input", "output gradient", "literal", "unknown"
    ]
    name: str
    facts: TensorFacts | None = None
    lines: tuple[Line, ...] = ()
    intended: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Birth:
    """An operation that made what is not finite out of finite tensors, or of masks.

    Attributes:
        constant: no tensor that went in leads back to a parameter.
        rival: another operation that made an infinity at the same elements, where the two cannot be told apart.
        cause: what repeating the operation at once has shown.
        repeated: whether all that the operation was given is known, so that it could be repeated.
    """

    when: int
    kind: Kind
    operation: str
    direction: Direction
    module: str
    module_type: str
    node: str
    lines: tuple[Line, ...]
    inputs: tuple[TensorFacts, ...]
    output: TensorFacts
    history: tuple[tuple[str, float], ...]
    cause: Cause
    constant: bool = False
    rival: str = ""
    repeated: bool = True


Source = Origin | Birth


def is_intended(source: Source) -> bool:
    return isinstance(source, Origin) and source.intended


def may_mask(source: Source, kind: Kind) -> bool:
    """Tell whether an infinity that nobody wrote can be a mask: log(0), arithmetic on constants, an input.

    Which one it is shows only where it is used: the softmax of such a mask is fine, ``0 * log(0)`` is not.
    """
    if kind != "-Inf":
        return False
    if isinstance(source, Origin):
        return source.what == "input"
    return source.constant or source.operation.rstrip("_") in _LOGARITHMS


def first_to_blame(sources: Iterable[Source]) -> Source | None:
    """Return the earliest source; what the script meant to be infinite only if there is nothing else."""
    in_order = sorted(set(sources), key=lambda source: source.when)
    blamed = [s for s in in_order if not is_intended(s)]
    return next(iter(blamed or in_order), None)
