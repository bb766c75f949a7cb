"""One operation of a replay, as a report shows it: inputs, outputs, and the line that called it."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsurgeon import _dist
from gradsurgeon.diagnosis import Line, TensorFacts

Kind = Literal["NaN", "Inf", "-Inf"]
KINDS: tuple[Kind, ...] = ("NaN", "Inf", "-Inf")
_HERE = Path(__file__).resolve().parent
_OURS = tuple(str(_HERE.parent / name) for name in ("forensics", "runtime", "_patching.py"))
_REPLAY = str(_HERE / "replay.py")
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n')


def facts(tensor: Tensor, name: str = "") -> TensorFacts:
    """Measure a tensor. Waits for its device."""
    values = elements(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, numel = tuple(tensor.shape), values.numel()
    if not is_real(values):
        low, high = ends(values) if numel else (None, None)
        return TensorFacts(name, shape, dtype, low, high, 0, 0, numel)
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    finite = values[values.isfinite()] if nan or inf else values
    low, high = ends(finite) if finite.numel() else (None, None)
    minus_inf = int(values.isneginf().sum()) if inf else 0
    return TensorFacts(name, shape, dtype, low, high, nan, inf, numel, minus_inf)


def elements(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor of any layout as real numbers; of a sharded tensor, the elements of this rank."""
    part = _dist.local(tensor.detach())
    if part.layout != torch.strided:
        part = part.coalesce().values() if part.layout == torch.sparse_coo else part.values()
    return torch.view_as_real(part.resolve_conj()) if part.is_complex() else part


def is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def ends(values: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest element, both NaN if any element is."""
    if values.dtype == torch.bool:
        return float(values.all()), float(values.any())
    low, high = torch.aminmax(values)
    return float(low), float(high)


def nonfinite_kind(tensor: Tensor) -> str:
    """Return ``NaN``, ``Inf`` or nothing, and NaN if there are both. Waits for the device."""
    if not is_real(tensor) or tensor.is_meta:
        return ""
    values = elements(tensor)
    if not values.numel():
        return ""
    low, high = ends(values)
    if low != low or high != high:  # noqa: PLR0124 # NaN
        return "NaN"
    return "Inf" if low == -torch.inf or high == torch.inf else ""


def kinds_in(tensor: Tensor) -> list[Kind]:
    """Return the kinds of non-finite elements in a tensor. Waits for the device."""
    if not nonfinite_kind(tensor):
        return []
    values = elements(tensor)
    return [kind for kind in KINDS if bool(where_is(values, kind).any())]


def where_is(values: Tensor, kind: Kind) -> Tensor:
    """Return a mask of the elements of one kind."""
    if kind == "NaN":
        return values.isnan()
    return values.isposinf() if kind == "Inf" else values.isneginf()


def tensors_of(*values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def named_tensors(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the arguments of an operation, with their names in its schema."""
    arguments = getattr(func, "_schema", None)
    names = [argument.name for argument in arguments.arguments] if arguments is not None else []
    given = [*zip(names, args, strict=False), *kwargs.items()]
    for name, value in given:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield f"{name}[{number}]", item


def lines_here() -> tuple[Line, ...]:
    """Return the lines of the script that led here, innermost last: see `_of_script`."""
    frames = traceback.extract_stack(sys._getframe(1))  # noqa: SLF001 # as `traceback` does it
    return _of_script(
        Line(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in frames
    )


def lines_of_node(node: Any) -> tuple[Line, ...]:
    """Return the lines that built a node of the graph: anomaly mode keeps them with the node."""
    written = () if node is None else node.metadata.get("traceback_") or ()
    found = []
    for text in written:
        if match := _FRAME.match(text):
            line = int(match["line"])
            source = linecache.getline(match["file"], line).strip()
            found.append(Line(match["file"], line, match["function"], source))
    return _of_script(found)


def _of_script(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the innermost line of the script, and after it the innermost line of a library that it called, if any.

    Lines of torch and of this package do not count, and neither do the lines that led to the replay.
    """
    inner: list[Line] = []
    for line in lines:
        if line.file == _REPLAY:
            inner.clear()
        inner.append(line)
    foreign = [
        line for line in inner if not line.file.startswith((*_OURS, _TORCH, "<frozen", "<string"))
    ]
    if not foreign:
        return ()
    own = [line for line in foreign if not _INSTALLED.search(line.file)]
    last = foreign[-1]
    return (last,) if not own or own[-1] == last else (own[-1], last)
