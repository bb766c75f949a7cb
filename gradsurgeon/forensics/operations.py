"""One operation of a replay: arguments, numbers, and the module and line that called it."""

import linecache
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from gradsurgeon.common.diagnosis import Line, TensorFacts
from gradsurgeon.common.rows import Rows
from gradsurgeon.language.planning import named_modules
from gradsurgeon.tensors import _dist, _torch

Kind = Literal["NaN", "Inf", "-Inf"]
_MATRIX = 2
_MOST_ROWS = 100
# More columns say less than their number.
_MOST_COLUMNS = 3
KINDS: tuple[Kind, ...] = ("NaN", "Inf", "-Inf")
Place = tuple[str, str]
_HERE = Path(__file__).resolve().parent
_OURS = tuple(str(_HERE.parent / name) for name in ("forensics", "runtime", "common/_patching.py"))
_REPLAY = str(_HERE / "replay.py")
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n')


@dataclass(frozen=True, slots=True)
class Call:
    """An operation and its arguments, to be repeated, with copies of tensors that it has written over.

    ``written`` has these tensors, by identity of the copy.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def stem(self) -> str:
        """The name without namespace and without the underscore of in-place operations."""
        return self.name.rpartition(".")[2].rstrip("_")

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_of(self.args, self.kwargs)

    @property
    def nonfinite_numbers(self) -> list[float]:
        leaves = tree_leaves((self.args, self.kwargs))
        return [n for n in leaves if isinstance(n, float) and not math.isfinite(n)]

    def passed(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the script passed: it differs from a copy of one that was written over."""
        return self.written.get(id(tensor), tensor)

    def written_into(self) -> list[Tensor]:
        """Return the tensors among the arguments that the operation writes into."""
        written = set()
        for argument in self._arguments():
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.add(argument.name)
        return tensors_of([value for name, value in self._values() if name in written])

    def _arguments(self) -> Sequence[Any]:
        """Return the arguments in the schema of the operation; none without a schema."""
        schema = getattr(self.func, "_schema", None)
        if schema is None:
            return ()
        arguments: Sequence[Any] = schema.arguments
        return arguments

    def _values(self) -> Iterator[tuple[str, Any]]:
        for argument, value in zip(self._arguments(), self.args, strict=False):
            yield argument.name, value
        yield from self.kwargs.items()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors among the arguments, each with the name of its argument."""
        for name, value in self._values():
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, list | tuple):
                for index, item in enumerate(value):
                    if isinstance(item, Tensor):
                        yield f"{name}[{index}]", item


def name_of(func: Any) -> str:
    """Return the name of an operation without its overload."""
    return str(func.name()).partition(".")[0].replace("::", ".")


def tensors_of(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def facts(tensor: Tensor, name: str = "") -> TensorFacts:
    """Measure a tensor. Waits for its device."""
    values = elements(tensor)
    counts = {kind: int(where_is(values, kind).sum()) for kind in KINDS}
    finite = values
    rows = None
    if any(counts.values()):
        finite = values[values.isfinite()]
        # Of a sharded, sparse or complex tensor the values have another shape.
        if values.dim() and values.shape == tensor.shape:
            rows = _rows_in(values.isnan() if counts["NaN"] else values.isinf())
    low = None
    high = None
    if finite.numel():
        low, high = ends(finite)
    dtype = str(tensor.dtype).removeprefix("torch.")
    infinite = counts["Inf"] + counts["-Inf"]
    # The ragged dimension of a nested tensor has no number.
    sizes: Iterable[Any] = tensor.shape
    shape = tuple([size if isinstance(size, int) else -1 for size in sizes])
    return TensorFacts(
        name,
        shape,
        dtype,
        low,
        high,
        counts["NaN"],
        infinite,
        values.numel(),
        counts["-Inf"],
        rows,
    )


def _rows_in(places: Tensor) -> Rows | None:
    """Return the rows of a mask that are not empty, ``None`` for all or very many rows. Waits for its device."""
    table = places.reshape(len(places), -1)
    rows: list[int] = table.any(1).nonzero().flatten().tolist()
    columns: list[int] = table.any(0).nonzero().flatten().tolist()
    if len(rows) == len(places) or len(rows) > _MOST_ROWS:
        return None
    if places.dim() != _MATRIX or len(columns) > _MOST_COLUMNS or len(columns) == table.size(1):
        columns = []
    return Rows(tuple(rows), len(places), tuple(columns))


def elements(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that can be read as real numbers; of a sharded tensor, those of this rank."""
    part = _dist.local(tensor.detach())
    if _torch.is_freed(part):
        return part.new_empty(0)
    if part.layout == torch.sparse_coo:
        part = part.coalesce().values()
    elif part.layout != torch.strided:
        part = part.values()
    if part.is_complex():
        return torch.view_as_real(part.resolve_conj())
    return part


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
    if bool(values.isfinite().all()):
        return ""
    if bool(values.isnan().any()):
        return "NaN"
    return "Inf"


def kinds_in(tensor: Tensor) -> list[Kind]:
    """Return the kinds of non-finite elements in a tensor. Waits for the device."""
    if not nonfinite_kind(tensor):
        return []
    values = elements(tensor)
    return [kind for kind in KINDS if bool(where_is(values, kind).any())]


def where_is(values: Tensor, kind: Kind) -> Tensor:
    if kind == "NaN":
        return values.isnan()
    if kind == "Inf":
        return values.isposinf()
    return values.isneginf()


@dataclass(slots=True, eq=False)
class ModuleCalls:
    """The calls of modules while a call of the model is replayed.

    ``running`` has the first node that each module builds, ``done`` the first and the end, inner calls first.
    """

    running: list[tuple[Place, int]] = field(default_factory=list)
    done: list[tuple[Place, int, int]] = field(default_factory=list)

    @contextmanager
    def watched(self, root: nn.Module, came_out: Callable[[str, Any], None]) -> Iterator[None]:
        names: dict[int, str] = {}
        for name, module in named_modules(root).items():
            names.setdefault(id(module), name)

        def before(module: nn.Module, args: Any) -> None:
            del args
            if id(module) in names:
                place = names[id(module)], type(module).__name__
                self.running.append((place, _next_node()))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            del args
            if id(module) in names:
                self.done.append((*self.running.pop(), _next_node()))
                came_out(names[id(module)], output)

        with (
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        ):
            yield

    def place(self, node: Any) -> Place:
        """Return the module that runs, or the module that built the running node, if any."""
        if self.running:
            return self.running[-1][0]
        if node is not None:
            number = node._sequence_nr()  # noqa: SLF001 # no public name
            for place, first, end in self.done:
                if first <= number < end:
                    return place
        return ("", "")


def _next_node() -> int:
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001 # numbers nodes


def lines_here() -> tuple[Line, ...]:
    frames = traceback.extract_stack(sys._getframe(1))  # noqa: SLF001 # as `traceback` does it
    return _of_script(Line(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames)


def lines_of_node(node: Any) -> tuple[Line, ...]:
    """Return the lines that built a node of the graph: anomaly mode keeps them with the node."""
    frames = node.metadata.get("traceback_")
    if not frames:
        return ()
    lines = []
    for frame in frames:
        parts = _FRAME.match(frame)
        if parts is not None:
            file = parts["file"]
            number = int(parts["line"])
            text = linecache.getline(file, number).strip()
            lines.append(Line(file, number, parts["function"], text))
    return _of_script(lines)


def _of_script(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the innermost line of the script, and after it that of a library that it called, if any."""
    inner: list[Line] = []
    for line in lines:
        if line.file == _REPLAY:
            inner.clear()
        elif not line.file.startswith((*_OURS, _TORCH, "<frozen", "<string")):
            inner.append(line)
    own = [line for line in inner if not _INSTALLED.search(line.file)]
    return tuple(dict.fromkeys((*own[-1:], *inner[-1:])))
