"""``gradsurgeon diff``: what a change of a rule file does. Only `--model` imports torch."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from gradsurgeon.cli import fail
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.review import difference, markdown, sources, text

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> int:
    """Print the difference; 1 where there is one and `--exit-code` asks, 2 where none can be told."""
    try:
        old, new = sources.rules_at(arguments.old), sources.rules_at(arguments.new)
        manifest = sources.manifest_of(arguments.params, arguments.model)
    except GradSurgeonError as error:
        return fail(str(error))
    found = difference.compare(old, new, manifest)
    if arguments.format == "json":
        print(json.dumps(found.to_dict(), indent=2))
    elif arguments.format == "markdown":
        sys.stdout.write(markdown.render(found))
    else:
        print(text.render(found))
    return int(arguments.exit_code and found.in_effect)
