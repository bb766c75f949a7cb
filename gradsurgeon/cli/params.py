"""``gradsurgeon params``: the names of a model as a file, and whether such a file is up to date."""

import argparse
import difflib
import sys
from collections.abc import Iterator

from gradsurgeon.cli import fail
from gradsurgeon.cli.options import add_model, add_output, writing
from gradsurgeon.errors import printable
from gradsurgeon.planning import Manifest, manifest_file
from gradsurgeon.planning.table import count
from gradsurgeon.review import sources

_SHOWN = 50


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_output(parser)
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="write nothing: say whether FILE has the names of the model; without --model, whether FILE is "
        "as it was written",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.check is not None:
        if arguments.output is not None:
            return fail("`--check` writes nothing: leave out `--output`, or `--check`")
        return _check(arguments.check, arguments.model)
    if arguments.model is None:
        return fail("`params` needs `--model MODULE:NAME`, or `--check FILE`")
    manifest, output = sources.manifest_of(model=arguments.model), arguments.output
    with writing(output):
        if output is None:
            sys.stdout.write(manifest_file.dumps(manifest))
        else:
            manifest_file.write(manifest, output)
    print(f"{printable(output or 'standard output')}: {_about(manifest)}", file=sys.stderr)
    return 0


def _about(manifest: Manifest) -> str:
    size = f"{count(len(manifest.params), 'parameter')}, {manifest.elements:,} elements"
    return f"{printable(manifest.origin)}, {size}, {manifest_file.to_dict(manifest)['hash']}"


def _check(file: str, model: str | None) -> int:
    # The file is read before the model is built: reading takes no time, and may fail.
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
