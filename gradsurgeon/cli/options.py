"""Options and helpers that several commands share."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.records.store.files import replacing

RULE_FILE = "a rule file, REF:FILE of a git commit, or a pack"


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run directory, finished or still being written"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")


def add_page(parser: argparse._ActionsContainer, *, what: str) -> None:
    parser.add_argument("--html", metavar="FILE", type=_page, help=what)


def _page(name: str) -> str:
    # The path of an empty name is the current directory.
    place = Path(name)
    if name == "-" or (place.exists() and not place.is_file()):
        raise argparse.ArgumentTypeError(
            f"`{printable(name)}` is no file that a browser can open: name one, such as report.html"
        )
    return name


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        action="append",
        dest="modules",
        default=[],
        metavar="MODULE",
        help="import a module, which runs its code, for the actions and statistics that it defines; "
        "Python also searches the current folder; may be given several times",
    )


def add_names(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    add_model(group)
    group.add_argument(
        "--params",
        metavar="FILE",
        help="the names of the model: params.json as `gradsurgeon params` writes it, or *.safetensors; needs "
        "neither torch nor the model",
    )


def add_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        metavar="RUN",
        help="also show what the rules would have done in a recorded run, from its norms; needs neither torch nor the "
        "model: the names are in the run",
    )


def add_model(parser: argparse._ActionsContainer, *, required: bool = False) -> None:
    parser.add_argument(
        "--model",
        required=required,
        metavar="MODULE:NAME",
        help="the model, or a function or class that returns it, such as train.net:build; imports your "
        "code, also from the current folder",
    )


@contextmanager
def writing(output: str | None) -> Iterator[None]:
    """Name the file in a `GradSurgeonError` if it cannot be written; errors of standard output pass through."""
    try:
        yield
    except OSError as error:
        if output is None:
            raise
        raise GradSurgeonError(
            f"cannot write {printable(output)}: {error.strerror or error}"
        ) from None


def is_terminal() -> bool:
    """Tell whether standard output is a terminal that understands escape sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def print_json(form: Mapping[str, Any]) -> None:
    # GitHub reads `##[` anywhere in a line of a job's log as a command.
    print(json.dumps(form, indent=2).replace("##[", "#\\u0023["))


def write_output(text: str, output: str | None) -> None:
    with writing(output):
        if output is None:
            sys.stdout.write(text)
            sys.stdout.flush()  # otherwise the summary on stderr could come first
            return
        with replacing(Path(output)) as file:
            file.write(text)
