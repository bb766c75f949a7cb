"""``gradsurgeon diff``: what a change of a rule file does. Only `--model` imports torch."""

import argparse
import sys

from gradsurgeon.cli.options import RULE_FILE, add_import, add_names, add_on, print_json
from gradsurgeon.cli.review import difference, on_run, sources, text


def add_options(parser: argparse.ArgumentParser) -> None:
    for name in ("old", "new"):
        parser.add_argument(name, metavar=name.upper(), help=RULE_FILE)
    add_names(parser)
    add_on(parser)
    parser.add_argument(
        "--format",
        choices=("text", "markdown", "json"),
        default="text",
        help="markdown is for a comment on a pull request, json is documented and stable; default: text",
    )
    parser.add_argument(
        "--exit-code", action="store_true", help="exit with 1 if the effect differs"
    )
    add_import(parser)


def run(arguments: argparse.Namespace) -> int:
    # The model comes last: building it takes long and may need much memory.
    old = sources.rules_at(arguments.old)
    new = sources.rules_at(arguments.new)
    run = on_run.run_at(arguments.on)
    manifest = sources.manifest_of(arguments.params, arguments.model, run)
    compared = difference.compare(old, new, manifest, run)
    if arguments.format == "json":
        print_json(compared.to_dict())
    elif arguments.format == "markdown":
        sys.stdout.write(text.markdown(compared))
    else:
        print(text.render(compared))
    return int(arguments.exit_code and compared.in_effect)
