"""`params.json`: the names of a model as a file, so that rules can be planned without it.

The format is stable: version, origin, hash of what the names are, parameters and modules. What holds
of few models is written for them only: ``sparse`` and ``sharding`` of a parameter, ``aliases`` and
``inplace`` of a module. Files of weights name parameters as well, though they tell less: see `read`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib
from dataclasses import replace
from typing import Any

from gradsurgeon.errors import ManifestError
from gradsurgeon.planning import strict_json, weights
from gradsurgeon.planning.checked import (
    DTYPE,
    FLAG,
    HASH,
    NAME,
    NAMES,
    SHAPE,
    SHARDING,
    SOME_FLAG,
    SOME_NAMES,
    Checked,
    Field,
    Path,
)
from gradsurgeon.planning.manifest import ROOT, Manifest, Module, Param

VERSION = 1

_TOP = {
    "version": Field(f"the number {VERSION}", lambda value: value == VERSION and value is not True),
    "origin": NAME,
    "hash": HASH,
    "params": Field("", lambda _: True),
    "modules": Field("", lambda _: True),
}
_PARAM = {
    "name": NAME,
    "aliases": NAMES,
    "shape": SHAPE,
    "dtype": DTYPE,
    "requires_grad": FLAG,
    "module_type": NAMES,
    "sparse": SOME_FLAG,
    "sharding": SHARDING,
}
_MODULE = {"name": NAME, "type": NAMES, "aliases": SOME_NAMES, "inplace": SOME_FLAG}


def to_dict(manifest: Manifest) -> dict[str, Any]:
    """Return the documented form of a manifest."""
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
    """Return the text of a file: one line per parameter and module, for reviews of its changes."""
    data = to_dict(manifest)
    lines = [
        f" {json.dumps(key)}: {json.dumps(data[key])}," for key in ("version", "origin", "hash")
    ]
    for key, end in (("params", ","), ("modules", "")):
        items = ",\n".join(f"  {json.dumps(item)}" for item in data[key])
        lines.append(f' "{key}": [\n{items}\n ]{end}' if items else f' "{key}": []{end}')
    return "\n".join(["{", *lines, "}", ""])


def write(manifest: Manifest, path: str | os.PathLike[str]) -> None:
    """Write a file, whole or not at all: half a file would be read as a damaged one in some pull request.

    Raises:
        FileExistsError: a file of another kind is there, which nobody has asked to replace.
        OSError: the file cannot be written.
    """
    place = pathlib.Path(path)
    text = dumps(manifest)
    if place.exists() and not place.is_file():
        place.write_text(text, encoding="utf-8", newline="\n")  # /dev/stdout is not to be replaced
        return
    place = place.resolve()
    if place.exists() and place.stat().st_size and not _is_manifest(place):
        kept = "a file of another kind is there and stays: move it away, or write to another"
        raise FileExistsError(errno.EEXIST, kept, os.fspath(path))
    draft = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def _is_manifest(path: pathlib.Path) -> bool:
    """Tell whether a file is one of ours, be it an outdated or an edited one."""
    try:
        data = strict_json.read(path)
    except ManifestError:
        return False
    return isinstance(data, dict) and data.keys() >= _TOP.keys()


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
    """Return the names in a ``params.json``, a ``*.safetensors``, or a ``*.index.json`` of shards.

    Raises:
        ManifestError: everything that is wrong with the file, at once.
    """
    file = os.fspath(path)
    if file.endswith(".safetensors"):
        return weights.from_safetensors(file)
    data = strict_json.read(file)
    if isinstance(data, dict) and "weight_map" in data:
        return weights.from_index(data, file)
    return from_dict(data, file)


def from_dict(data: object, file: str = "<dict>") -> Manifest:
    """Return the manifest that `to_dict` has written, possibly by way of JSON.

    A hash that is not that of the content is a note of the manifest: it has been edited by hand, or
    two versions of it were merged.

    Raises:
        ManifestError: everything that is wrong with the data, at once.
    """
    if isinstance(data, dict):
        _check_version(data.get("version"), file)
    checked = Checked(file)
    top = checked.fields(data, (), _TOP)
    given = data if isinstance(data, dict) else {}
    params, modules = (
        [
            checked.fields(item, (key, index), fields)
            for index, item in enumerate(checked.items(given.get(key, []), (key,)))
        ]
        for key, fields in (("params", _PARAM), ("modules", _MODULE))
    )
    for key, items, noun in (("params", params, "parameter"), ("modules", modules, "module")):
        checked.distinct(_all_names(key, items), noun)
    checked.done()
    assert top is not None  # noqa: S101 # or there was a problem
    return _manifest(top, params, modules, file)


def _check_version(version: object, file: str) -> None:
    """Refuse a file of a later version: it may mean other things by the same words."""
    if isinstance(version, int) and version > VERSION:
        message = f"this is version {version} of the format, this gradsurgeon reads {VERSION}"
        strict_json.refuse(file, message, "upgrade gradsurgeon")


def _all_names(key: str, items: list[dict[str, Any] | None]) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    for index, item in enumerate(items):
        if item is not None:
            found.append(((key, index, "name"), item["name"]))
            aliases = item.get("aliases", ())
            found += [((key, index, "aliases", at), name) for at, name in enumerate(aliases)]
    return found


def _manifest(
    top: dict[str, Any],
    params: list[dict[str, Any] | None],
    modules: list[dict[str, Any] | None],
    file: str,
) -> Manifest:
    found = tuple(
        Module(one["name"], one.get("aliases", ()), one["type"], one.get("inplace", False))
        for one in modules
        if one is not None
    )
    manifest = Manifest(
        origin=top["origin"],
        params=tuple(Param(**one) for one in params if one is not None),
        modules=found,
        model_type=next((one.module_type for one in found if one.name == ROOT), ()),
    )
    if to_dict(manifest)["hash"] == top["hash"]:
        return manifest
    return replace(manifest, notes=(edited(file),))


def edited(file: str) -> str:
    """Return what to say of a file whose hash is not that of its content."""
    return (
        f"{file} was edited by hand, or merged: its hash is not that of its content; write it again "
        "with `gradsurgeon params`"
    )
