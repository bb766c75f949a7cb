"""``gradsurgeon diff``: what a change of a rule file does. Only `--model` imports torch."""

import argparse
import json
import sys

from gradsurgeon.cli import fail
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.review import difference, markdown, sources, text


def run(arguments: argparse.Namespace) -> int:
    try:
        # The model last: to build it takes long, and may need much.
        old, new = sources.rules_at(arguments.old), sources.rules_at(arguments.new)
        manifest = sources.manifest_of(arguments.params, arguments.model)
    except GradSurgeonError as error:
        return fail(str(error))
    compared = difference.compare(old, new, manifest)
    if arguments.format == "json":
        # To a job of GitHub `##[` is the beginning of a command, wherever it stands in a line.
        print(json.dumps(compared.to_dict(), indent=2).replace("##[", "#\\u0023["))
    elif arguments.format == "markdown":
        sys.stdout.write(markdown.render(compared))
    else:
        print(text.render(compared))
    return int(arguments.exit_code and compared.in_effect)
