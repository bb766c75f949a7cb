"""`params.json`: the names of a model as a file, so that rules can be planned without it.

The format is stable: version, origin, hash of what the names are, parameters and modules.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from gradsurgeon.planning.manifest import Manifest, Module, Param

VERSION = 1


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
    }


def _module(module: Module) -> dict[str, Any]:
    return {"name": module.name, "type": list(module.module_type)}
