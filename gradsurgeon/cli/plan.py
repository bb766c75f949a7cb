"""``gradsurgeon plan``: what rules bind to in a model. Only `--model` imports torch."""

import argparse
import sys

from gradsurgeon.cli.lint import UNREADABLE
from gradsurgeon.cli.options import RULE_FILE, add_import, add_names, print_json
from gradsurgeon.cli.review import sources
from gradsurgeon.errors import BindError, RuleFileError
from gradsurgeon.language import planning


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=RULE_FILE)
    add_names(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    add_import(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        # The rules come first: building the model takes longer, and needs torch.
        rules = sources.rules_at(arguments.file)
        plan = planning.bind(rules, sources.manifest_of(arguments.params, arguments.model))
    except RuleFileError as error:
        print(error, file=sys.stderr)
        if any(problem.check == UNREADABLE for problem in error.problems):
            return 2
        return 1
    except BindError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.format == "json":
        print_json(plan)
    else:
        print(plan)
    return 0
