"""``gradsurgeon params``: the names of a model as a file, and whether such a file is up to date."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gradsurgeon.cli import fail
from gradsurgeon.errors import ManifestError, ModelError, printable
from gradsurgeon.planning import Manifest, manifest_file, strict_json
from gradsurgeon.planning.table import count
from gradsurgeon.review import sources

if TYPE_CHECKING:
    import argparse

_HASH = re.compile("sha256:[0-9a-f]{64}")
_SHOWN = 50


def run(arguments: argparse.Namespace) -> int:
    """Write the names, or check a file of them; 1 where it is stale, 2 where there is no model."""
    if arguments.check is None and arguments.model is None:
        return fail("`params` needs `--model MODULE:NAME`, or `--check FILE`")
    if arguments.check is not None and arguments.output is not None:
        return fail("`--check` writes nothing: leave out `--output`, or `--check`")
    try:
        if arguments.check is None:
            return _write(sources.manifest_of(model=arguments.model), arguments.output)
        return _check(arguments.check, arguments.model)
    except (ManifestError, ModelError) as error:
        return fail(str(error))


def _write(manifest: Manifest, output: str | None) -> int:
    if output is None:
        sys.stdout.write(manifest_file.dumps(manifest))
    else:
        try:
            manifest_file.write(manifest, output)
        except OSError as error:
            return fail(f"cannot write {printable(output)}: {error.strerror or error}")
    where = printable(output or "standard output")
    print(f"{where}: {_about(manifest)}", file=sys.stderr)
    return 0


def _about(manifest: Manifest) -> str:
    size = f"{count(len(manifest.params), 'parameter')}, {manifest.elements:,} elements"
    return f"{printable(manifest.origin)}, {size}, {manifest_file.to_dict(manifest)['hash']}"


def _check(given: str, model: str | None) -> int:
    """Compare a file, or a hash alone, with the model; a file alone with its own hash."""
    if _HASH.fullmatch(given):
        return _check_hash(given, model)
    # The file before the model: it takes no time, and may be wrong.
    known = manifest_file.from_dict(strict_json.read(given), given)
    shown = printable(given)
    if model is None:
        changes = list(known.notes)
    else:
        now = sources.manifest_of(model=model)
        changes = [*known.notes, *_changes(known, now)]
    if not changes:
        done = "is intact" if model is None else "is up to date"
        print(f"{shown} {done}: {_about(known)}", file=sys.stderr)
        return 0
    print(f"{shown} is stale:")
    for text in changes[:_SHOWN]:
        print(f"  {printable(text)}")
    if len(changes) > _SHOWN:
        print(f"  and {len(changes) - _SHOWN} more")
    name = printable(model or "MODULE:NAME")
    print(f"write it again: gradsurgeon params --model {name} -o {shown}")
    return 1


def _check_hash(given: str, model: str | None) -> int:
    if model is None:
        return fail("`--check` with a hash needs `--model MODULE:NAME` to compare it with")
    now = sources.manifest_of(model=model)
    current = manifest_file.to_dict(now)["hash"]
    if current == given:
        print(f"the hash is that of the model: {_about(now)}", file=sys.stderr)
        return 0
    print(f"stale: the hash of {printable(now.origin)} is {current}, not {given}")
    print("a hash does not tell what has changed: check a file for that")
    return 1


def _changes(known: Manifest, now: Manifest) -> Iterator[str]:
    """Yield a line for each difference."""
    if known.origin != now.origin:
        yield f"~ origin: {known.origin} -> {now.origin}"
    before, after = manifest_file.to_dict(known), manifest_file.to_dict(now)
    for key, noun in (("params", "parameter"), ("modules", "module")):
        yield from _items(before[key], after[key], noun)


def _items(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], noun: str
) -> Iterator[str]:
    old = {item["name"]: item for item in before}
    new = {item["name"]: item for item in after}
    changed = [name for name in new if name in old and new[name] != old[name]]
    yield from (f"+ {noun} {name}{_size(new[name])}" for name in new if name not in old)
    yield from (f"- {noun} {name}{_size(old[name])}" for name in old if name not in new)
    yield from (f"~ {noun} {name}: {_difference(old[name], new[name])}" for name in changed)
    if [name for name in old if name in new] != [name for name in new if name in old]:
        yield f"~ the order of the {noun}s"


def _size(item: dict[str, Any]) -> str:
    return f" {item['dtype']} {item['shape']}" if "shape" in item else f" ({item['type'][0]})"


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "; ".join(f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}" for key in keys)


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
