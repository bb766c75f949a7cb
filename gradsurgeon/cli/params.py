"""``gradsurgeon params``: the names of a model as a file, to plan rules without the model."""

import argparse
import sys

from gradsurgeon.cli.options import add_model, add_output, write_output, writing
from gradsurgeon.cli.review import sources
from gradsurgeon.errors import printable
from gradsurgeon.language.planning import manifest_file
from gradsurgeon.language.planning.table import count


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    manifest = sources.manifest_of(model=arguments.model)
    output = arguments.output
    file = "standard output"
    if output is None:
        write_output(manifest_file.dumps(manifest), None)
    else:
        file = printable(output)
        with writing(output):
            manifest_file.write(manifest, output)
    size = f"{count(len(manifest.params), 'parameter')}, {manifest.elements:,} elements"
    digest = manifest_file.to_dict(manifest)["hash"]
    print(f"{file}: {printable(manifest.origin)}, {size}, {digest}", file=sys.stderr)
    return 0
