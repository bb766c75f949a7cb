"""The names in a file of weights: the header of a ``.safetensors``, or an index of several.

The tensors themselves are never read. Such a file tells names, shapes and dtypes, in no useful order;
it tells neither classes of modules nor which tensors train, are tied, or are buffers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from gradsurgeon.planning import strict_json
from gradsurgeon.planning.manifest import ROOT, Manifest, Module, Name, Param, Shape
from gradsurgeon.planning.strict_json import ProblemList

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


def from_safetensors(file: str) -> Manifest:
    """Return the names in the header of a file.

    Raises:
        ManifestError: it cannot be read, or is no such file.
    """
    params, aliases, left_out = _tensors(file)
    return _manifest(file, params, aliases, left_out, [])


def from_index(data: Mapping[str, object], file: str) -> Manifest:
    """Return the names in an index, with shapes from the shards that lie beside it.

    Raises:
        ManifestError: everything that is wrong with the index, or with one of the shards.
    """
    shards = _weight_map(data, file)
    params: dict[str, Param] = {}
    aliases: dict[str, str] = {}
    left_out: list[str] = []
    missing: list[str] = []
    problems = ProblemList(file)
    names: dict[str, list[str]] = {}
    for name, shard in shards.items():
        names.setdefault(shard, []).append(name)
    for shard, names_inside in names.items():
        path = Path(file).parent / shard
        # Shards of pickles would have to be run to be read.
        if path.suffix != ".safetensors" or not path.exists():
            missing.append(shard)
            params.update((name, _param(name, None, "")) for name in names_inside)
            continue
        tensors, tied, without = _tensors(os.fspath(path))
        for name in names_inside:
            if name in tensors:
                params[name] = tensors[name]
            elif name not in without and name not in tied:
                message = f"{shard} holds no tensor of this name"
                problems.add(("weight_map", name), message, "index and shards are of two models")
        aliases |= tied
        left_out += without
    problems.done()
    notes = []
    if missing:
        notes.append(
            f"{len(missing)} of {len(names)} files of weights are not there, or hold "
            f"pickles (such as {missing[0]}): shapes and dtypes of their parameters are not known, and "
            "count as 0 elements"
        )
    return _manifest(file, params, aliases, left_out, notes)


def _weight_map(data: Mapping[str, object], file: str) -> dict[str, str]:
    problems = ProblemList(file)
    given = data["weight_map"]
    if not isinstance(given, dict):
        strict_json.refuse(file, "`weight_map` must be an object: names and their files")
    for name, shard in given.items():
        path = ("weight_map", name)
        problems.checked(Name, name, path)
        if not isinstance(shard, str) or not shard:
            problems.add(path, "expected the name of a file beside the index")
        elif shard in (".", "..") or not {"/", "\\", ":", "\0"}.isdisjoint(shard):
            message = (
                f"`{shard[:60]}` is no plain name of a file: only files beside the index are read"
            )
            problems.add(path, message)
    problems.done()
    return dict(given)


def _tensors(file: str) -> tuple[dict[str, Param], dict[str, str], list[str]]:
    """Return tensors by name, for the names that are tied to one of these which, and those left out."""
    header = strict_json.parse(_header(file), file)
    if not isinstance(header, dict):
        strict_json.refuse(file, "its header is no JSON object: this is no safetensors file")
    problems = ProblemList(file)
    metadata = header.pop("__metadata__", {})
    params: dict[str, Param] = {}
    left_out: list[str] = []
    for name, entry in header.items():
        problems.checked(Name, name, (name,))
        tensor = problems.checked(_Tensor, entry, (name,))
        if tensor is None:
            continue
        if tensor.dtype.startswith(_WITHOUT_GRADIENT):
            left_out.append(name)
        else:
            dtype = _DTYPES.get(tensor.dtype, tensor.dtype.lower())
            params[name] = _param(name, tensor.shape, dtype)
    problems.done()
    return params, _tied(metadata, params), left_out


def _tied(metadata: object, params: Mapping[str, Param]) -> dict[str, str]:
    """Return the names that were dropped on saving, each with the one that stands for it.

    ``safetensors.torch.save_model`` leaves them in the metadata.
    """
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    return {
        name: kept
        for name, kept in pairs
        if name and name not in params and isinstance(kept, str) and kept in params
    }


def _header(file: str) -> bytes:
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
            if length > strict_json.MAX_BYTES:
                strict_json.refuse(file, f"a header of {length} bytes is not read")
            return stream.read(length)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        cause = getattr(error, "strerror", None) or str(error)
        strict_json.refuse(file, f"cannot read the file: {cause}", "", "unreadable-file")


def _param(name: str, shape: tuple[int, ...] | None, dtype: str) -> Param:
    return Param(name, (), shape, dtype, requires_grad=True, module_type=())


def _manifest(
    file: str,
    params: Mapping[str, Param],
    aliases: Mapping[str, str],
    left_out: list[str],
    notes: list[str],
) -> Manifest:
    tied: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        if alias not in params:
            tied.setdefault(name, []).append(alias)
    said = [
        f"names come from {file}: it does not tell buffers from parameters, nor which are frozen or "
        "tied, and it lacks modules without parameters"
    ]
    if left_out:
        said.append(
            f"{len(left_out)} tensors of whole numbers are left out (such as {left_out[0]})"
        )
    return Manifest(
        origin=file,
        params=tuple(
            Param(
                name,
                tuple(sorted(tied.get(name, ()), key=_in_order)),
                params[name].shape,
                params[name].dtype,
                requires_grad=True,
                module_type=(),
            )
            for name in sorted(params, key=_in_order)
        ),
        modules=tuple(_modules(sorted([*params, *aliases], key=_in_order))),
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
