"""The names in a file of weights: the header of a ``.safetensors``, or an index of several.

The tensors themselves are never read. Such a file tells names, shapes and dtypes, in no useful order;
it tells neither classes of modules nor which tensors train, are tied, or are buffers.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from gradsurgeon.planning import strict_json
from gradsurgeon.planning.manifest import ROOT, Manifest, Module, Name, Param, Shape

_LEAD = 8  # bytes that hold the length of the header
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
# Nothing has a gradient that holds whole numbers or bits.
_WITHOUT_GRADIENT = ("I", "U", "BOOL")


@dataclass(frozen=True, slots=True)
class _Tensor:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    dtype: Annotated[str, Field(max_length=40)]
    shape: Shape
    data_offsets: Any = None


def _beside(shard: str) -> str:
    if shard in ("", ".", "..") or not {"/", "\\", ":", "\0"}.isdisjoint(shard):
        raise ValueError("no plain name of a file: only files beside the index are read")
    return shard


@dataclass(frozen=True, slots=True)
class _Index:
    weight_map: dict[Name, Annotated[str, AfterValidator(_beside)]]


class _Header(NamedTuple):
    params: dict[str, Param]  # those that can have a gradient
    left_out: list[str]  # names of those that hold whole numbers


def from_safetensors(file: str) -> Manifest:
    return _manifest(file, _header(file))


def from_index(data: object, file: str) -> Manifest:
    """Return the names in an index, with shapes from the shards that lie beside it."""
    names_in: dict[str, list[str]] = {}
    for name, shard in strict_json.checked(_Index, data, file).weight_map.items():
        names_in.setdefault(shard, []).append(name)
    found = _Header({}, [])
    missing: list[str] = []
    for shard, names in names_in.items():
        path = Path(file).parent / shard
        # Shards of pickles would have to be run to be read.
        if path.suffix != ".safetensors" or not path.exists():
            missing.append(shard)
            found.params.update((name, _param(name, None, "")) for name in names)
            continue
        header = _header(os.fspath(path))
        known = header.params.keys() | set(header.left_out)
        if strange := [name for name in names if name not in known]:
            message = f"{shard} holds no tensor `{strange[0][:60]}`"
            strict_json.refuse(file, message, "index and shards are of two models")
        found.params.update((name, header.params[name]) for name in names if name in header.params)
        found.left_out.extend(header.left_out)
    if not missing:
        return _manifest(file, found)
    note = (
        f"{len(missing)} of {len(names_in)} files of weights are not there, or hold pickles (such as "
        f"{missing[0]}): shapes and dtypes of their parameters are not known, and count as 0 elements"
    )
    return _manifest(file, found, note)


def _header(file: str) -> _Header:
    entries = strict_json.parse(_header_text(file), file)
    if not isinstance(entries, dict):
        strict_json.refuse(file, "its header is no JSON object: this is no safetensors file")
    entries.pop("__metadata__", None)
    found = _Header({}, [])
    for name, tensor in strict_json.checked(dict[Name, _Tensor], entries, file).items():
        if tensor.dtype.startswith(_WITHOUT_GRADIENT):
            found.left_out.append(name)
        else:
            dtype = _DTYPES.get(tensor.dtype, tensor.dtype.lower())
            found.params[name] = _param(name, tensor.shape, dtype)
    return found


def _header_text(file: str) -> bytes:
    path = Path(file)
    try:
        if path.exists() and not path.is_file():
            strict_json.refuse(file, "is no regular file", "name a file", "unreadable-file")
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            lead = stream.read(_LEAD)
            length = int.from_bytes(lead, "little")
            if lead == b"version ":
                strict_json.refuse(file, "this is a pointer of Git LFS", "git lfs pull")
            if len(lead) < _LEAD or length > size - _LEAD:
                message = (
                    "this is no safetensors file, or it is cut off: its header does not fit in it"
                )
                strict_json.refuse(file, message, "save or download it again")
            return stream.read(min(length, strict_json.MAX_BYTES + 1))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        strict_json.unreadable(file, error)


def _param(name: str, shape: tuple[int, ...] | None, dtype: str) -> Param:
    return Param(name, (), shape, dtype, requires_grad=True, module_type=())


def _manifest(file: str, found: _Header, *notes: str) -> Manifest:
    names = sorted(found.params, key=_in_order)
    said = [
        f"names come from {file}: it does not tell buffers from parameters, nor which are frozen or "
        "tied, and it lacks modules without parameters"
    ]
    if found.left_out:
        count = len(found.left_out)
        said.append(f"{count} tensors of whole numbers are left out (such as {found.left_out[0]})")
    return Manifest(
        origin=file,
        params=tuple(found.params[name] for name in names),
        modules=tuple(_modules(names)),
        notes=(*said, *notes),
    )


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which ``h.2`` comes before ``h.10``: layers stand in their order again."""
    steps = name.split(".")
    return [(not step.isdecimal(), int(step) if step.isdecimal() else 0, step) for step in steps]


def _modules(names: Iterable[str]) -> Iterable[Module]:
    """Return the root and every prefix of the names, each before those inside it."""
    paths = {ROOT: None}
    for name in names:
        parts = name.split(".")
        paths.update((".".join(parts[:depth]), None) for depth in range(1, len(parts)))
    return [Module(path, (), ()) for path in paths if path]
