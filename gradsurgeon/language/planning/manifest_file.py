"""The names of a model as a file, perhaps of a stranger."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, NoReturn, TypeVar

from pydantic import ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from gradsurgeon.actions import described
from gradsurgeon.errors import ManifestError, Place, Problem, cause_of, shorten_names
from gradsurgeon.language.planning.manifest import ROOT, Manifest, ModuleEntry, Name, Param, Shape
from gradsurgeon.language.schema import Built
from gradsurgeon.records.store.files import check_replaceable, replacing

VERSION = 1
# A model of 100,000 tensors needs 40 MB.
MAX_BYTES = 100_000_000
# One byte of JSON can become many bytes of memory: this many values need half a gigabyte.
_MAX_VALUES = 6_000_000
_KINDS = "names come from params.json or from *.safetensors"
_WRITE_AGAIN = "write the file again: `gradsurgeon params`"

_LEAD = 8  # bytes of a safetensors file that hold the length of its header
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
# Tensors of whole numbers or bits have no gradient.
_WITHOUT_GRADIENT = ("I", "U", "BOOL")

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _File:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: Literal[1]
    origin: Name
    hash: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    params: Annotated[tuple[Param, ...], FailFast()]
    modules: Annotated[tuple[ModuleEntry, ...], FailFast()]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in the header of a safetensors file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    dtype: Annotated[str, Field(max_length=40)]
    shape: Shape
    data_offsets: Any = None


def to_dict(manifest: Manifest) -> dict[str, Any]:
    content = {
        "params": _plain(tuple[Param, ...], manifest.params),
        "modules": _plain(tuple[ModuleEntry, ...], manifest.modules),
    }
    head = {"version": VERSION, "origin": manifest.origin, "hash": digest(content)}
    return {**head, **content}


def _plain(kind: Any, things: Sequence[Param | ModuleEntry]) -> Any:
    adapter = TypeAdapter(kind)
    return adapter.dump_python(things, mode="json", by_alias=True, exclude_defaults=True)


def digest(content: dict[str, Any]) -> str:
    """Return the hash of parameters and modules; it does not depend on layout or order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def dumps(manifest: Manifest) -> str:
    entries = []
    for key, value in to_dict(manifest).items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            items = [f"  {json.dumps(item)}" for item in value]
            text = "[\n" + ",\n".join(items) + "\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def write(manifest: Manifest, path: str | os.PathLike[str]) -> None:
    place = Path(path)
    check_replaceable(place, "params.json", b'{\n "version"')
    with replacing(place) as file:
        file.write(dumps(manifest))


def read(path: str | os.PathLike[str]) -> Manifest:
    file = os.fspath(path)
    if file.endswith(".safetensors"):
        return _from_weights(file)
    return from_dict(_read_json(file), file)


def from_dict(data: object, file: str = "<dict>") -> Manifest:
    """Return the manifest that `to_dict` has written; a wrong hash becomes a note of the manifest."""
    top = _checked(_File, data, file)
    _refuse_repetition("parameter", top.params, file)
    _refuse_repetition("module", top.modules, file)
    model_type: tuple[str, ...] = ()
    for module in top.modules:
        if module.name == ROOT:
            model_type = module.module_type
    manifest = Manifest(top.origin, top.params, top.modules, model_type)
    if to_dict(manifest)["hash"] == top.hash:
        return manifest
    note = (
        f"{file} was edited by hand, or merged: its hash does not fit its content; write it again "
        "with `gradsurgeon params`"
    )
    return replace(manifest, notes=(note,))


def _refuse_repetition(noun: str, things: Sequence[Param | ModuleEntry], file: str) -> None:
    names: Counter[str] = Counter()
    for thing in things:
        names.update(thing.names)
    for name, times in names.items():
        if times > 1:
            _refuse(file, f"the {noun} `{name[:60]}` is listed twice", _WRITE_AGAIN)


def _from_weights(file: str) -> Manifest:
    entries = _read_json(file, header=True)
    if not isinstance(entries, dict):
        _refuse(file, "its header is no JSON object: this is no safetensors file")
    entries.pop("__metadata__", None)
    tensors = _checked(dict[Name, _Tensor], entries, file)
    params = []
    left_out = []
    # The modules: every prefix of the names, each before the modules inside it.
    paths = {ROOT: None}
    for name in sorted(tensors):
        dtype = tensors[name].dtype
        shape = tensors[name].shape
        if dtype.startswith(_WITHOUT_GRADIENT):
            left_out.append(name)
            continue
        dtype = _DTYPES.get(dtype, dtype.lower())
        params.append(Param(name, (), shape, dtype, requires_grad=True, module_type=()))
        path = ""
        for segment in name.split(".")[:-1]:
            path += segment
            paths[path] = None
            path += "."
    notes = [
        f"names come from {file}: it does not tell buffers from parameters, nor which are frozen or "
        "tied, and it lacks modules without parameters"
    ]
    if left_out:
        notes.append(f"tensors of whole numbers are left out: {shorten_names(left_out)}")
    modules = tuple(ModuleEntry(path, (), ()) for path in paths if path)
    return Manifest(file, tuple(params), modules, notes=tuple(notes))


def _read_json(file: str, *, header: bool = False) -> object:
    try:
        with Path(file).open("rb") as stream:
            # A bounded read, because the path may be a device. One byte more tells that there is more.
            length = MAX_BYTES + 1
            if header:
                length = min(length, _header_length(stream, file))
            raw = stream.read(length)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        _refuse(file, f"cannot read the file: {cause_of(error)}", _KINDS, "unreadable-file")
    if len(raw) > MAX_BYTES:
        _refuse(file, f"more than {MAX_BYTES // 1_000_000} MB of JSON are not read", _KINDS)
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > _MAX_VALUES:
        _refuse(file, f"more than {_MAX_VALUES:,} values are not read", _KINDS)
    try:
        return from_json(raw.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
    except ValueError as error:
        _refuse(file, f"not JSON: {error}", _KINDS)


def _header_length(stream: BinaryIO, file: str) -> int:
    lead = stream.read(_LEAD)
    length = int.from_bytes(lead, "little")
    if len(lead) < _LEAD or length > os.fstat(stream.fileno()).st_size - _LEAD:
        message = "no safetensors file, or one that is cut off"
        _refuse(file, message, "save it again, or download it, as by `git lfs pull`")
    return length


def _checked(kind: type[_Value], value: object, file: str) -> _Value:
    try:
        valid: _Value = TypeAdapter(kind).validate_python(value)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        path = tuple(_shortened(step) for step in first["loc"])
        text = first["msg"].replace("Input should be", "expected").replace("valid tuple", "list")
        message = f"{text}, found {described(first['input'])}"
        if first["type"] == "missing":
            message = f"missing key `{path[-1]}`"
            path = path[:-1]
        place = Built(None, file=file).place(path)
        raise ManifestError([Problem(place, "bad-manifest", message, _WRITE_AGAIN)]) from None
    return valid


def _shortened(step: str | int) -> str | int:
    if isinstance(step, str):
        return step[:60]
    return step


def _refuse(file: str, message: str, hint: str = "", check: str = "bad-manifest") -> NoReturn:
    raise ManifestError([Problem(Place(file, 0, 0), check, message, hint)])
