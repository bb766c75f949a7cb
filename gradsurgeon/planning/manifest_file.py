"""`params.json`: the names of a model as a file, so that rules can be planned without it.

The format is stable: version, origin, hash of what the names are, parameters and modules. What holds
of few models is written for them only: ``sparse`` and ``sharding`` of a parameter, ``aliases`` and
``inplace`` of a module. Files of weights name parameters as well, though they tell less: see `read`.
"""

import errno
import hashlib
import json
import os
import pathlib
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, FailFast, Field

from gradsurgeon.errors import ManifestError
from gradsurgeon.planning import strict_json, weights
from gradsurgeon.planning.manifest import ROOT, Manifest, Module, Name, Param
from gradsurgeon.store.files import replacing

VERSION = 1


@dataclass(frozen=True, slots=True)
class _File:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: Literal[1]
    origin: Name
    hash: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    # No hand writes such a file: the first item that is wrong says enough.
    params: Annotated[tuple[Param, ...], FailFast()]
    modules: Annotated[tuple[Module, ...], FailFast()]


def to_dict(manifest: Manifest) -> dict[str, Any]:
    content = {
        "params": [_param(param) for param in manifest.params],
        "modules": [_module(module) for module in manifest.modules],
    }
    return {
        "version": VERSION,
        "origin": manifest.origin,
        "hash": digest(content),
        **content,
    }


def dumps(manifest: Manifest) -> str:
    data = to_dict(manifest)
    lines = [
        f" {json.dumps(key)}: {json.dumps(data[key])}," for key in ("version", "origin", "hash")
    ]
    for key, end in (("params", ","), ("modules", "")):
        items = ",\n".join(f"  {json.dumps(item)}" for item in data[key])
        lines.append(f' "{key}": [\n{items}\n ]{end}' if items else f' "{key}": []{end}')
    return "\n".join(["{", *lines, "}", ""])


def write(manifest: Manifest, path: str | os.PathLike[str]) -> None:
    """Write a file, unless one of another kind is there, which nobody has asked to replace."""
    place = pathlib.Path(path)
    if place.is_file() and place.stat().st_size and not _is_manifest(place):
        kept = "a file of another kind is there and stays: move it away, or write to another"
        raise FileExistsError(errno.EEXIST, kept, os.fspath(path))
    with replacing(place) as file:
        file.write(dumps(manifest))


def _is_manifest(path: pathlib.Path) -> bool:
    try:
        data = strict_json.read(path)
    except ManifestError:
        return False
    return isinstance(data, dict) and data.keys() >= {field.name for field in fields(_File)}


def digest(content: dict[str, Any]) -> str:
    """Return the hash of parameters and modules; it does not depend on layout or order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _param(param: Param) -> dict[str, Any]:
    return {
        "name": param.name,
        "aliases": list(param.aliases),
        "shape": None if param.shape is None else list(param.shape),
        "dtype": param.dtype,
        "requires_grad": param.requires_grad,
        "module_type": list(param.module_type),
        **({"sparse": True} if param.sparse else {}),
        **({"sharding": param.sharding} if param.sharding else {}),
    }


def _module(module: Module) -> dict[str, Any]:
    return {
        "name": module.name,
        "type": list(module.module_type),
        **({"aliases": list(module.aliases)} if module.aliases else {}),
        **({"inplace": True} if module.inplace else {}),
    }


def read(path: str | os.PathLike[str]) -> Manifest:
    """Return the names in a ``params.json``, a ``*.safetensors``, or a ``*.index.json`` of shards."""
    file = os.fspath(path)
    if file.endswith(".safetensors"):
        return weights.from_safetensors(file)
    data = strict_json.read(file)
    if isinstance(data, dict) and "weight_map" in data:
        return weights.from_index(data, file)
    return from_dict(data, file)


def from_dict(data: object, file: str = "<dict>") -> Manifest:
    """Return the manifest that `to_dict` has written; a hash that is not that of its content is a note."""
    version = data.get("version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > VERSION:  # it may mean other things by the same words
        message = f"this is version {version} of the format, this gradsurgeon reads {VERSION}"
        strict_json.refuse(file, message, "upgrade gradsurgeon")
    top = strict_json.checked(_File, data, file)
    for noun, things in (("parameter", top.params), ("module", top.modules)):
        names = Counter(name for thing in things for name in thing.names)
        if twice := [name for name, count in names.items() if count > 1]:
            message = f"the {noun} `{twice[0][:60]}` stands twice"
            strict_json.refuse(file, message, strict_json.WRITE_AGAIN)
    root = next((one.module_type for one in top.modules if one.name == ROOT), ())
    manifest = Manifest(top.origin, top.params, top.modules, root)
    if to_dict(manifest)["hash"] == top.hash:
        return manifest
    note = (
        f"{file} was edited by hand, or merged: its hash is not that of its content; write it again "
        "with `gradsurgeon params`"
    )
    return replace(manifest, notes=(note,))
