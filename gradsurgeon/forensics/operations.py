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

Kind = Literal["NaN", "Inf"]
_MATRIX = 2
_MOST_ROWS = 100
# More columns say less than their number.
_MOST_COLUMNS = 3
# An infinity beside a NaN is not what made the NaN, so NaN comes first.
KINDS: tuple[Kind, ...] = ("NaN", "Inf")
Place = tuple[str, str]
_HERE = Path(__file__).resolve().parent
_OURS = tuple(str(_HERE.parent / name) for name in ("forensics", "runtime", "common/_patching.py"))
_REPLAY = str(_HERE / "replay.py")
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"
_NO_SCRIPT = (*_OURS, _TORCH, "<frozen", "<string")
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
        numbers = [leaf for leaf in leaves if isinstance(leaf, float)]
        return [number for number in numbers if not math.isfinite(number)]

    def passed(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the script passed: it differs from a copy of one that was written over."""
        return self.written.get(id(tensor), tensor)

    def written_into(self) -> list[Tensor]:
        """Return the tensors among the arguments that the operation writes into."""
        written = set()
        for argument in arguments_of(self.func):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.add(argument.name)
        return tensors_of([value for name, value in self.arguments.items() if name in written])

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, as far as the operation has a schema."""
        names = [argument.name for argument in arguments_of(self.func)]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors among the arguments, each with the name of its argument."""
        for name, value in self.arguments.items():
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, list | tuple):
                for index, item in enumerate(value):
                    if isinstance(item, Tensor):
                        yield f"{name}[{index}]", item


def arguments_of(func: Any) -> Sequence[Any]:
    """Return the arguments in the schema of an operation; none without a schema."""
    return getattr(getattr(func, "_schema", None), "arguments", ())


def name_of(func: Any) -> str:
    """Return the name of an operation without its overload."""
    return str(func.name()).partition(".")[0].replace("::", ".")


def tensors_of(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def facts(tensor: Tensor, name: str = "") -> TensorFacts:
    """Measure a tensor. Waits for its device."""
    values = elements(tensor)
    finite = values
    rows = None
    nan = int(values.isnan().sum())
    infinite = int(values.isinf().sum())
    if nan or infinite:
        finite = values[values.isfinite()]
        # The values of a sharded, sparse or complex tensor have another shape.
        if values.dim() and values.shape == tensor.shape:
            rows = _rows_in(where_is(values, "NaN" if nan else "Inf"))
    low = None
    high = None
    if finite.numel():
        low, high = ends(finite)
    # The ragged dimension of a nested tensor has no number.
    sizes: Iterable[Any] = tensor.shape
    return TensorFacts(
        name,
        shape=tuple([size if isinstance(size, int) else -1 for size in sizes]),
        dtype=str(tensor.dtype).removeprefix("torch."),
        low=low,
        high=high,
        nan=nan,
        inf=infinite,
        numel=values.numel(),
        minus_inf=int(values.isneginf().sum()),
        rows=rows,
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
        values = values.byte()
    low, high = torch.aminmax(values)
    return float(low), float(high)


def nonfinite_kind(tensor: Tensor) -> Literal["", "NaN", "Inf"]:
    """Return ``NaN``, ``Inf`` or nothing, and NaN if there are both. Waits for the device."""
    for kind in kinds_in(tensor):
        return kind
    return ""


def kinds_in(tensor: Tensor) -> list[Kind]:
    """Return the kinds of non-finite elements in a tensor. Waits for the device."""
    if not is_real(tensor) or tensor.is_meta:
        return []
    values = elements(tensor)
    if bool(values.isfinite().all()):
        return []
    return [kind for kind in KINDS if bool(where_is(values, kind).any())]


def where_is(values: Tensor, kind: Kind) -> Tensor:
    if kind == "NaN":
        return values.isnan()
    return values.isinf()


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
                self.running.append((place, _torch.next_node_number()))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            del args
            if id(module) in names:
                self.done.append((*self.running.pop(), _torch.next_node_number()))
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


def lines_here() -> tuple[Line, ...]:
    stack = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 # documented
    places = []
    for frame, line in stack:
        code = frame.f_code
        places.append((code.co_filename, line, code.co_name))
    return _of_script(places)


def lines_of_node(node: Any) -> tuple[Line, ...]:
    """Return the lines that built a node of the graph: anomaly mode keeps them with the node."""
    places = []
    for frame in reversed(node.metadata.get("traceback_") or ()):
        parts = _FRAME.match(frame)
        if parts is not None:
            places.append((parts["file"], int(parts["line"]), parts["function"]))
    return _of_script(places)


def _of_script(places: Iterable[tuple[str, int, str]]) -> tuple[Line, ...]:
    """Return the innermost line of the script, and that of a library that it called, if any; inner places come first."""
    lines: list[Line] = []
    for file, number, function in places:
        if file == _REPLAY:
            break
        if file.startswith(_NO_SCRIPT):
            continue
        is_own = not _INSTALLED.search(file)
        if is_own or not lines:
            text = linecache.getline(file, number).strip()
            lines.insert(0, Line(file, number, function, text))
        if is_own:
            break
    return tuple(lines)
