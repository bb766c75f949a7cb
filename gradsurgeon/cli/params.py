"""``gradsurgeon params``: the names of a model as a file, and whether such a file is up to date."""

import argparse
import difflib
import sys
from collections.abc import Iterator

from gradsurgeon.cli import fail
from gradsurgeon.errors import ManifestError, ModelError, printable
from gradsurgeon.planning import Manifest, manifest_file
from gradsurgeon.planning.table import count
from gradsurgeon.review import sources

_SHOWN = 50


def run(arguments: argparse.Namespace) -> int:
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


def _check(file: str, model: str | None) -> int:
    # The file before the model: it takes no time, and may be wrong.
    known = manifest_file.from_dict(manifest_file.read_json(file), file)
    changes = list(known.notes)
    if model is not None:
        changes += _changes(known, sources.manifest_of(model=model))
    shown = printable(file)
    if not changes:
        print(f"{shown} is up to date: {_about(known)}", file=sys.stderr)
        return 0
    print(f"{shown} is stale:")
    for text in changes[:_SHOWN]:
        print(f"  {printable(text)}")
    if len(changes) > _SHOWN:
        print(f"  and {len(changes) - _SHOWN} more")
    name = printable(model or "MODULE:NAME")
    print(f"write it again: gradsurgeon params --model {name} -o {shown}")
    return 1


def _changes(known: Manifest, now: Manifest) -> Iterator[str]:
    before, after = (manifest_file.dumps(manifest).splitlines() for manifest in (known, now))
    for line in difflib.unified_diff(before, after, n=0, lineterm=""):
        if not line.startswith(("---", "+++", "@@")):
            yield line
