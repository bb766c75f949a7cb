"""``gradsurgeon plan``: what rules bind to in a model. Imports torch for ``--model`` only."""

import argparse
import json
import sys

from gradsurgeon import planning
from gradsurgeon.cli import fail
from gradsurgeon.cli.lint import UNREADABLE
from gradsurgeon.errors import BindError, ManifestError, ModelError, RuleFileError
from gradsurgeon.review import sources


def run(arguments: argparse.Namespace) -> int:
    try:
        # Before the model is built: that takes longer, and needs torch.
        rules = sources.rules_at(arguments.file)
        for problem in rules.warnings:
            print(problem.concise(), file=sys.stderr)
        plan = planning.bind(rules, sources.manifest_of(arguments.params, arguments.model))
    except RuleFileError as error:
        print(error, file=sys.stderr)
        return 2 if any(problem.check == UNREADABLE for problem in error.problems) else 1
    except BindError as error:
        print(error, file=sys.stderr)
        return 1
    except (ManifestError, ModelError) as error:
        return fail(str(error))
    print(json.dumps(plan.to_dict(), indent=2) if arguments.format == "json" else plan)
    return 0
