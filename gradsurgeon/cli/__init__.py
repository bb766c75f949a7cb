"""The command line. Only `plan` imports torch; each command is imported when it is called.

Exit codes: 0 clean, 1 something was found in the rules or in how they bind, 2 the command could not
do its work (usage, an unreadable file, a model that cannot be built, a fault of ours).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from gradsurgeon.errors import did_you_mean, printable

_COMMANDS = ("run", "lint", "plan", "diff", "report", "export", "explain", "schema")
_NOT_YET = ("params", "replay")
_INTERRUPTED, _BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: the arguments, those of the process if not given.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets its escape instead of a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough. The interpreter flushes once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except Exception:  # noqa: BLE001 # whatever it is, the exit code must not say "problems found"
        traceback.print_exc()
        return fail(
            "internal error: this is a fault of gradsurgeon, please report it with the above"
        )
    return code


def fail(message: str) -> int:
    """Print why the command could not do its work; return the exit code for that."""
    print(f"gradsurgeon: {message}", file=sys.stderr)
    return 2


def _dispatch(argv: Sequence[str]) -> int:
    parser = _parser()
    word = argv[0] if argv else ""
    if not word:
        parser.print_help(sys.stderr)
        return 2
    if word == "--version":
        from gradsurgeon.schema import VERSION  # noqa: PLC0415 # `--help` needs no pydantic

        print(f"gradsurgeon {VERSION}")
        return 0
    if word in _NOT_YET:
        from gradsurgeon.schema import VERSION  # noqa: PLC0415 # as above

        return fail(f"`{word}` is not there yet in gradsurgeon {VERSION}")
    if word == "run":
        # What follows belongs to the script, once the script is named.
        from gradsurgeon.launcher import command  # noqa: PLC0415 # the others do not need it

        return command.main(argv[1:])
    if word not in _COMMANDS and not word.startswith("-"):
        hint = did_you_mean(word, _COMMANDS) or f"known: {', '.join(_COMMANDS)}"
        return fail(f"unknown command `{printable(word[:60])}` ({hint})")
    arguments = parser.parse_args(argv)
    return int(import_module(f"gradsurgeon.cli.{arguments.command}").run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradsurgeon",
        description="Rules for gradients, as a file that a team reviews like code.",
        epilog="exit codes: 0 clean, 1 problems found, 2 the command could not do its work",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)

    command("run", "Run a training script with rules on it, without editing it.")
    lint = command("lint", "Check rule files: every problem, with its place and a remedy.")
    lint.add_argument("files", nargs="+", metavar="FILE", help="a rule file")
    lint.add_argument(
        "--format", choices=("full", "concise", "json"), default="full", help="default: full"
    )
    plan = command("plan", "Show what rules bind to in a model, touching nothing.")
    plan.add_argument("file", metavar="FILE", help="a rule file")
    plan.add_argument(
        "--model",
        required=True,
        metavar="MODULE:NAME",
        help="a function or class that returns the model, or the model itself, such as "
        "train.net:build; the current folder is searched for it",
    )
    plan.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    _add_diff(command("diff", "Show what a change of a rule file does, on a model."))
    explain = command("explain", "Show what an action does, its options and examples.")
    explain.add_argument("action", nargs="?", metavar="ACTION", help="without it: all actions")
    command("schema", "Print the JSON Schema of rule files, for editors.")
    report = command("report", "Show what a run looked like: norms, rules, events.")
    _add_run(report)
    report.add_argument("--ascii", action="store_true", help="draw with ASCII only")
    _add_export(command("export", "Write the records of a run, one value per line."))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, still being written or not")


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl"),
        required=True,
        help="csv has values only; jsonl has events as well, and NaN and Infinity as texts",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    parser.add_argument("--stat", metavar="STAT", help="only this statistic, such as l2")
    parser.add_argument("--rule", metavar="RULE", help="only what this rule recorded")
    parser.add_argument("--name", metavar="PATTERN", help='only these tensors, such as "*.bias"')


def _add_diff(parser: argparse.ArgumentParser) -> None:
    for name in ("old", "new"):
        what = "a rule file, or GIT-REF:PATH for one of a commit"
        parser.add_argument(name, metavar=name.upper(), help=what)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", metavar="FILE", help="the names of the model, as params.json")
    model.add_argument("--model", metavar="MODULE:NAME", help="the model itself, as for `plan`")
    parser.add_argument(
        "--format",
        choices=("text", "markdown", "json"),
        default="text",
        help="markdown is for a comment on a pull request; default: text",
    )
    parser.add_argument(
        "--exit-code", action="store_true", help="exit with 1 where the effect differs"
    )
