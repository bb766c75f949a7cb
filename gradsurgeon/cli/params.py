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
    manifest, output = sources.manifest_of(model=arguments.model), arguments.output
    if output is None:
        write_output(manifest_file.dumps(manifest), None)
    else:
        with writing(output):
            manifest_file.write(manifest, output)
    size = f"{count(len(manifest.params), 'parameter')}, {manifest.elements:,} elements"
    about = f"{printable(manifest.origin)}, {size}, {manifest_file.to_dict(manifest)['hash']}"
    print(f"{printable(output or 'standard output')}: {about}", file=sys.stderr)
    return 0
