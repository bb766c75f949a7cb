"""``gradsurgeon diff``: what a change of a rule file does. Only `--model` imports torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gradsurgeon.cli import fail
from gradsurgeon.cli.lint import UNREADABLE
from gradsurgeon.errors import GradSurgeonError, RuleFileError, printable
from gradsurgeon.review import difference, markdown, sources, text

if TYPE_CHECKING:
    import argparse

_Read = TypeVar("_Read")


def run(arguments: argparse.Namespace) -> int:
    """Print the difference; 1 where there is one and `--exit-code` asks, 2 where none can be told."""
    # On either side: whoever corrects one should not find the other then.
    wrong: list[GradSurgeonError] = []
    old = _unless(wrong, partial(sources.rules_at, arguments.old))
    new = _unless(wrong, partial(sources.rules_at, arguments.new))
    manifest = None
    if not wrong or arguments.model is None:  # to build a model takes long, and may need much
        names = partial(sources.manifest_of, arguments.params, arguments.model)
        manifest = _unless(wrong, names)
    if old is None or new is None or manifest is None:
        texts = dict.fromkeys(map(str, wrong))
        if (old is None) != (new is None) and _is_unreadable(wrong[0]):
            there = printable(arguments.new if old is None else arguments.old)
            plan = f"gradsurgeon plan {there}"
            texts[f"there is nothing to compare {there} with; what its rules do: {plan}"] = None
        return fail("\n".join(texts))
    compared = difference.compare(old, new, manifest)
    if arguments.format == "json":
        # To a job of GitHub `##[` is the beginning of a command, wherever it stands in a line.
        print(json.dumps(compared.to_dict(), indent=2).replace("##[", "#\\u0023["))
    elif arguments.format == "markdown":
        sys.stdout.write(markdown.render(compared))
    else:
        print(text.render(compared))
    return int(arguments.exit_code and compared.in_effect)


def _is_unreadable(error: GradSurgeonError) -> bool:
    problems = error.problems if isinstance(error, RuleFileError) else ()
    return any(problem.check == UNREADABLE for problem in problems)


def _unless(wrong: list[GradSurgeonError], read: Callable[[], _Read]) -> _Read | None:
    """Return what is read; ``None`` where that is wrong, which is added to ``wrong``."""
    try:
        return read()
    except GradSurgeonError as error:
        wrong.append(error)
        return None
