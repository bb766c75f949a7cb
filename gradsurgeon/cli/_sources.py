"""Where `diff` gets rules and names from, until `gradsurgeon.review.sources` is there."""

from __future__ import annotations

import json
import pathlib
import subprocess

from gradsurgeon import schema, source
from gradsurgeon.cli import plan
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.planning import Manifest, Module, Param, from_model
from gradsurgeon.schema import RuleSet


def rules_at(spec: str) -> RuleSet:
    """Return the rules of a path, or of ``git-ref:path``."""
    ref, _, path = spec.partition(":")
    if not path or pathlib.Path(spec).exists():
        return schema.validate(source.read(spec))
    done = subprocess.run(  # noqa: S603 # without a shell, and the ref is no option
        ["git", "show", "--end-of-options", f"{ref}:./{path}"],  # noqa: S607 # the user's own git
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise GradSurgeonError(f"git cannot show {spec}: {done.stderr.strip()}")
    return schema.validate(source.parse(done.stdout, spec))


def manifest_of(params: str | None, model: str | None) -> Manifest:
    """Return the names of a model, from a ``params.json`` or from the model itself."""
    if params is None:
        return from_model(plan._model(model or ""))  # noqa: SLF001 # gone with this file
    data = json.loads(pathlib.Path(params).read_text(encoding="utf-8"))
    modules = tuple(Module(one["name"], (), tuple(one["type"])) for one in data.get("modules", ()))
    found = tuple(
        Param(
            name=one["name"],
            aliases=tuple(one["aliases"]),
            shape=None if one["shape"] is None else tuple(one["shape"]),
            dtype=one["dtype"],
            requires_grad=one["requires_grad"],
            module_type=tuple(one["module_type"]),
        )
        for one in data["params"]
    )
    root = next((one.module_type for one in modules if one.name == "."), ())
    return Manifest(data["origin"], found, modules, root)
