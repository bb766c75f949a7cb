"""``gradsurgeon plan``: what rules bind to in a model. Only `--model` imports torch."""

import argparse
import sys

from gradsurgeon.cli.lint import UNREADABLE
from gradsurgeon.cli.options import RULE_FILE, add_import, add_names, add_on, print_json
from gradsurgeon.cli.review import on_run, sources
from gradsurgeon.errors import BindError, GradSurgeonError, RuleFileError
from gradsurgeon.language import planning
from gradsurgeon.language.planning import MatchedRules, Matcher


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=RULE_FILE)
    add_names(parser)
    add_on(parser)
    parser.add_argument(
        "--thresholds",
        action="store_true",
        help="with `--on`: also show the quantiles of what each rule compares with its bound, and how often each would have "
        "acted; a bound may be `?` in the file",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    add_import(parser)


def run(arguments: argparse.Namespace) -> int:
    thresholds = arguments.thresholds
    if thresholds and arguments.on is None:
        raise GradSurgeonError("`--thresholds` are of a recorded run: name it by `--on RUN`")
    try:
        # The rules come first: building the model takes longer, and needs torch.
        open_bounds = None
        if thresholds:
            rules, open_bounds = sources.rules_with_open_bounds(arguments.file)
        else:
            rules = sources.rules_at(arguments.file)
        run = on_run.run_at(arguments.on)
        manifest = sources.manifest_of(arguments.params, arguments.model, run)
        plan = planning.bind(rules, manifest)
    except RuleFileError as error:
        print(error, file=sys.stderr)
        if any(problem.check == UNREADABLE for problem in error.problems):
            return 2
        return 1
    except BindError as error:
        print(error, file=sys.stderr)
        return 1
    tried = on_run.tried(MatchedRules(rules, Matcher(manifest)), run, open_bounds)
    if arguments.format == "json":
        form = plan.to_dict()
        for entry in form["rules"]:
            if entry["id"] in tried:
                entry["on"] = tried[entry["id"]].to_dict()
        print_json(form)
        return 0
    print(plan)
    if tried:
        from gradsurgeon.report.evidence import words  # noqa: PLC0415 # imported with numpy

        print("", *words.table(tried), *words.thresholds(tried), sep="\n")
    return 0
