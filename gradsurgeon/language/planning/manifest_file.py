"""The names of a model as a file, perhaps of a stranger."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from gradsurgeon.actions import described
from gradsurgeon.common.tensor_file import tensors_of
from gradsurgeon.errors import ManifestError, Place, Problem, reason_of
from gradsurgeon.language.planning.manifest import ROOT, Manifest, ModuleEntry, Name, Param
from gradsurgeon.language.schema import Built
from gradsurgeon.records.store.files import check_replaceable, replacing

VERSION = 1
# A model of 100,000 tensors needs 40 MB.
MAX_BYTES = 100_000_000
_WRITE_AGAIN = "write the file again: `gradsurgeon params`"

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


@dataclass(frozen=True, slots=True)
class _File:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: Literal[1]
    origin: Name
    hash: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    params: Annotated[tuple[Param, ...], FailFast()]
    modules: Annotated[tuple[ModuleEntry, ...], FailFast()]


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
    """Return the manifest that `to_dict` has written."""
    try:
        top = TypeAdapter(_File).validate_python(data)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        place = Built(None, file=file).place(first["loc"])
        message = f"{first['msg']}, found {described(first['input'])}"
        if first["type"] == "missing":
            message = "the key is missing"
        raise ManifestError([Problem(place, "bad-manifest", message, _WRITE_AGAIN)]) from None
    model_type = {module.name: module.module_type for module in top.modules}.get(ROOT, ())
    return Manifest(top.origin, top.params, top.modules, model_type)


def _from_weights(file: str) -> Manifest:
    try:
        tensors = tensors_of(Path(file))
    except (OSError, ValueError) as error:
        _refuse(file, f"cannot read the file: {reason_of(error)}", "unreadable-file")
    params = []
    # The modules: every prefix of the names, each before the modules inside it.
    paths = {ROOT: None}
    for name in sorted(tensors):
        dtype = tensors[name].dtype
        if dtype.startswith(_WITHOUT_GRADIENT):
            continue
        dtype = _DTYPES.get(dtype, dtype.lower())
        shape = tensors[name].shape
        params.append(Param(name, (), shape, dtype, requires_grad=True, module_type=()))
        *owners, _ = accumulate(name.split("."), "{}.{}".format)
        paths |= dict.fromkeys(owners)
    note = (
        f"names come from {file}: it does not tell buffers from parameters, nor which are frozen or "
        "tied, and it lacks modules without parameters; tensors of whole numbers are left out"
    )
    modules = tuple(ModuleEntry(path, (), ()) for path in paths if path)
    return Manifest(file, tuple(params), modules, notes=(note,))


def _read_json(file: str) -> object:
    try:
        with Path(file).open("rb") as stream:
            # A bounded read, because the path may be a device. One byte more tells that there is more.
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        _refuse(file, f"cannot read the file: {reason_of(error)}", "unreadable-file")
    if len(raw) > MAX_BYTES:
        _refuse(file, f"more than {MAX_BYTES // 1_000_000} MB of JSON are not read")
    try:
        return from_json(raw.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)
    except ValueError as error:
        _refuse(file, f"not JSON: {error}")


def _refuse(file: str, message: str, check: str = "bad-manifest") -> NoReturn:
    hint = "names come from params.json or from *.safetensors"
    raise ManifestError([Problem(Place(file, 0, 0), check, message, hint)])
