"""Reads a file of `torch.save` that may come from anywhere: everything is bounded before anything is loaded.

A file of a few kilobytes can hold a compressed member of gigabytes, a tensor of 10^11 elements, or an endless structure.
"""

import os
import pickle
import pickletools
import stat
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO, FileIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

# Bounds of a file, which a state or bundle of the largest model stays far below.
MOST_MEMBERS = 100_000
MOST_VALUES = 3_000_000
DEEPEST = 100
_MOST_READ_AT_ONCE = 64 * 2**20
_MOST_OPCODES = 5_000_000
_MOST_OF_KIND = {"REDUCE": 200_000, "TUPLE": 500_000, "EMPTY": 500_000}
# Tensors may share memory, and have together this many times the bytes of the file, and some more.
_SHARED = 4
_MORE = 32 * 2**20
# `torch.save` writes these for tensors, numbers, texts, lists, tuples and dicts.
_NAMES = (
    "PROTO MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE EMPTY_DICT EMPTY_LIST "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET "
    "GLOBAL REDUCE BINPERSID"
)
_OPCODES = frozenset(_NAMES.split())
# By name, as a pickle has it; there is no public name.
_STORAGES = torch.storage._storage_type_to_dtype_map()  # noqa: SLF001 # see above


class RefusedError(ValueError):
    """The file is damaged, or goes beyond a bound."""


def load(path: Path, most_bytes: int, device: str | torch.device = "cpu") -> Any:
    """Return the content of a file of `torch.save`, on a device; `RefusedError` if it holds more than plain values."""
    with _opened(path, most_bytes) as file:
        return torch.load(file, map_location=device, weights_only=True)


def check(path: Path, most_bytes: int) -> None:
    with _opened(path, most_bytes):
        pass


@contextmanager
def _opened(path: Path, most_bytes: int) -> Iterator[BinaryIO]:
    # A pipe would block without a flag.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        try:
            _check(file, os.fstat(file.fileno()), most_bytes)
            file.seek(0)
            yield file
        except (OSError, RefusedError):
            raise
        except Exception as error:
            raise RefusedError("it is damaged, no whole file of `torch.save`") from error


def _check(file: BinaryIO, status: os.stat_result, most_bytes: int) -> None:
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise RefusedError("it is no file")
    if size > most_bytes:
        raise RefusedError(f"it has {size:,} bytes, and at most {most_bytes:,} are read")
    sparing = _Sparing(file.fileno(), closefd=False)
    with zipfile.ZipFile(sparing) as archive:
        raw, sizes = _members(archive, size)
    _count_opcodes(raw)
    _measure(_DryRun(raw, sizes, _SHARED * size + _MORE).load())


class _Sparing(FileIO):
    """A file that refuses large reads: `zipfile` would read the whole of a huge list of members."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MOST_READ_AT_ONCE:
            size = _MOST_READ_AT_ONCE + 1
        data = super().read(size)
        if len(data) > _MOST_READ_AT_ONCE:
            raise RefusedError("its list of members or its pickle is too long")
        return data


def _members(archive: zipfile.ZipFile, size: int) -> tuple[bytes, dict[str, int]]:
    members = archive.infolist()
    number = len(members)
    if number > MOST_MEMBERS:
        raise RefusedError(f"it has {number:,} members, and at most {MOST_MEMBERS:,} are read")
    sizes = {}
    offsets = []
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise RefusedError("it has compressed members, which `torch.save` never writes")
        sizes[member.filename] = member.file_size
        offsets.append(member.header_offset)
    root = next(iter(sizes), "").partition("/")[0]
    pickled = f"{root}/data.pkl"
    # `torch.load` ignores case, and must find the members that are checked here, and no others.
    are_plain = len({name.lower() for name in sizes}) == number and not archive.comment
    are_inside = all(name.startswith(f"{root}/") for name in sizes) and 0 in offsets
    if pickled not in sizes or not (are_plain and are_inside and sum(sizes.values()) <= size):
        raise RefusedError("its members are not as `torch.save` writes them")
    if sizes[pickled] > _MOST_READ_AT_ONCE:
        raise RefusedError("its pickle is too long")
    data = f"{root}/data/"
    tensors = {name.removeprefix(data): sizes[name] for name in sizes if name.startswith(data)}
    return archive.read(pickled), tensors


def _count_opcodes(raw: bytes) -> None:
    """Refuse a pickle with anything but plain values, or with too many."""
    counts = Counter[str]()
    for number, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
        name = opcode.name
        if name not in _OPCODES:
            raise RefusedError(f"it holds objects that would run code (opcode {name})")
        # A number for the memo makes the unpickler allocate a table of that size.
        if "BINPUT" in name and int(argument or 0) > number:
            raise RefusedError("its pickle names a place that is too far away")
        kind = name.partition("_")[0].rstrip("123")
        counts[kind] += 1
        if number >= _MOST_OPCODES or counts[kind] > _MOST_OF_KIND.get(kind, _MOST_OPCODES):
            raise RefusedError("its pickle has too many values")


class _Storage(NamedTuple):
    numel: int
    dtype: torch.dtype


class _DryRun(pickle.Unpickler):
    """Reads a pickle as `torch.load` does, with ``None`` for each tensor, after its size has been checked."""

    def __init__(self, raw: bytes, sizes: Mapping[str, int], most_bytes: int) -> None:
        super().__init__(BytesIO(raw))
        self._sizes = sizes
        self._left = most_bytes
        self._known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): tuple,
            ("torch.storage", "UntypedStorage"): torch.uint8,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor_of_storage,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch":
            dtype = _STORAGES.get(name, getattr(torch, name, None))
            if isinstance(dtype, torch.dtype):
                return dtype
        raise RefusedError(f"it holds objects that would run code ({module}.{name})"[:200])

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        is_storage = kind == "storage" and type(numel) is int
        if not is_storage or self._sizes[key] != numel * dtype.itemsize:
            raise RefusedError("a storage does not have its recorded size")
        return _Storage(numel, dtype)

    def _tensor_of_storage(self, storage: Any, *form: Any) -> None:
        self._tensor(storage, *form, storage.dtype)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *form: Any) -> None:
        requires_grad, _, dtype = form
        numbers = (offset, *size, *stride)
        are_sizes = all(type(number) is int and number >= 0 for number in numbers)
        if not are_sizes or type(requires_grad) is not bool:
            raise RefusedError("a tensor has sizes that are none")
        numel = prod(size)
        room = storage.numel * storage.dtype.itemsize // dtype.itemsize
        last = offset
        for length, step in zip(size, stride, strict=True):
            last += (length - 1) * step
        if numel and last >= room:
            raise RefusedError("a tensor reaches beyond its storage")
        self._left -= numel * dtype.itemsize
        if self._left < 0:
            raise RefusedError("its tensors have more elements than its size allows")


def _measure(content: Any) -> None:
    pending = [(content, 0)]
    met = 0
    while pending:
        value, depth = pending.pop()
        met += 1
        if met > MOST_VALUES or depth > DEEPEST:
            raise RefusedError("its structure is too large, too deep, or has no end")
        parts: Iterable[Any] = ()
        if isinstance(value, dict):
            parts = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            parts = value
        pending += [(part, depth + 1) for part in parts]
