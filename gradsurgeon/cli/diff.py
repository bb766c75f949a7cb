"""``gradsurgeon diff``: what a change of a rule file does. Only `--model` imports torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradsurgeon.cli import fail
from gradsurgeon.errors import GradSurgeonError
from gradsurgeon.review import difference, markdown, sources, text

if TYPE_CHECKING:
    import argparse


def run(arguments: argparse.Namespace) -> int:
    """Print the difference; 1 where there is one and `--exit-code` asks, 2 where none can be told."""
    wrong: list[str] = []  # on either side: whoever corrects one should not find the other then
    old, new = (_unless(wrong, sources.rules_at, spec) for spec in (arguments.old, arguments.new))
    manifest = None
    if not wrong or arguments.model is None:  # to build a model takes long, and may need much
        manifest = _unless(wrong, sources.manifest_of, arguments.params, arguments.model)
    if old is None or new is None or manifest is None:
        return fail("\n".join(dict.fromkeys(wrong)))
    found = difference.compare(old, new, manifest)
    if arguments.format == "json":
        print(json.dumps(found.to_dict(), indent=2))
    elif arguments.format == "markdown":
        sys.stdout.write(markdown.render(found))
    else:
        print(text.render(found))
    return int(arguments.exit_code and found.in_effect)


def _unless[**P, T](
    wrong: list[str], read: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """Return what is read; ``None`` where that is wrong, which is added to ``wrong``."""
    try:
        return read(*args, **kwargs)
    except GradSurgeonError as error:
        wrong.append(str(error))
        return None
