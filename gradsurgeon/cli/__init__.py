"""The command line. Only `--model` and `run` import torch; each command is imported when it is called.

Exit codes: 0 clean, 1 something was found in the rules or in how they bind, 2 the command could not
do its work (usage, an unreadable file, a model that cannot be built, a fault of ours).
"""

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import get_args

from gradsurgeon.errors import ModelError
from gradsurgeon.events import EventKind

_RULE_FILE = "a rule file, or REF:FILE of a git commit"
_LEAST_SECONDS = 0.2  # a run is written once in a second, and looking takes time from the training
_INTERRUPTED, _BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
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
    except Exception as error:  # noqa: BLE001 # whatever it is, the exit code must not say "problems found"
        if isinstance(error, FileNotFoundError) and not error.filename:  # as `getcwd` raises it
            return fail("the working directory does not exist any more: go to one that does")
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
            # What could not be written would be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return fail(f"cannot write to standard output: {error.strerror}")
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
    if argv[:1] == ["run"]:
        # What follows belongs to the script, once the script is named.
        from gradsurgeon.launcher import command  # noqa: PLC0415 # the others do not need it

        return command.main(argv[1:])
    parser = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    if argv[0] == "--version":
        from gradsurgeon.schema import VERSION  # noqa: PLC0415 # `--help` needs no pydantic

        print(f"gradsurgeon {VERSION}")
        return 0
    arguments = parser.parse_args(argv)
    if modules := getattr(arguments, "modules", ()):
        from gradsurgeon.review import model_loading  # noqa: PLC0415 # the others do not need it

        try:
            for module in modules:
                model_loading.import_module(module)
        except ModelError as error:
            return fail(str(error))
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
    _add_lint(command("lint", "Check rule files: every problem, with its place and a remedy."))
    plan = command("plan", "Show what rules bind to in a model, touching nothing.")
    plan.add_argument("file", metavar="FILE", help=_RULE_FILE)
    _add_names(plan)
    plan.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    _add_import(plan)
    _add_diff(command("diff", "Show what a change of a rule file does to a model."))
    _add_params(command("params", "Write the names of a model, to plan rules without it."))
    explain = command("explain", "Show what an action does, or what a check of lint means.")
    explain.add_argument(
        "action", nargs="?", metavar="NAME", help="an action or a check; without it: all of them"
    )
    _add_import(explain)
    command("schema", "Print the JSON Schema of rule files, for editors.")
    _add_report(command("report", "Show what a run looked like: norms, rules, events."))
    _add_watch(command("watch", "Show a run in the terminal while training goes on."))
    _add_replay(
        command("replay", "Run a step again that a trap has stopped, and tell what went wrong.")
    )
    _add_suggest(
        command("suggest", "Write rules whose thresholds come from the records of a healthy run.")
    )
    _add_export(command("export", "Write the records of a run, one value per line."))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, still being written or not")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run directory, still being written or not, or a folder of such",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write one page that needs no network instead: curves, a map of all norms, traps, rules; "
        "several runs stand beside one another",
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "github"),
        default="text",
        help="json is documented and stable, with NaN and Infinity as texts; github annotates a job with the "
        "events that `--fail-on` names; default: text",
    )
    parser.add_argument(
        "--fail-on",
        metavar="KIND,...",
        help="exit with 1 where an event of one of these kinds is in the run, or in a run inside it: "
        f"{', '.join(get_args(EventKind))}",
    )


def _add_watch(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--every",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help=f"how often to look, at least {_LEAST_SECONDS}; default: 2",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one whole screen as plain text, and exit"
    )
    parser.add_argument(
        "--wait", action="store_true", help="where there is no run yet, wait until it begins"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write the page of `report --html` as well, anew every few seconds",
    )
    parser.epilog = (
        "It ends with the run, or when you press q. Where standard output is no terminal, or TERM is "
        "`dumb`, it prints a line each time instead. NO_COLOR takes the colours away."
    )


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if _LEAST_SECONDS <= (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of at least {_LEAST_SECONDS}")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="the directory that the trap has named")
    parser.add_argument(
        "--model", required=True, metavar="MODULE:NAME",
        help="the model, or what builds it, such as train.net:build; imports your code",
    )  # fmt: skip
    parser.add_argument("--device", help="where to run it, such as cpu; default: as it is built")
    parser.add_argument("--pdb", action="store_true", help="stand in the debugger at the birth")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")


def _add_suggest(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--bites",
        type=_share,
        default=0.01,
        metavar="SHARE",
        help="in which share of the steps a threshold would have bitten, default: 0.01",
    )
    _add_output(parser)
    parser.epilog = (
        "exit codes: 0 a threshold for every parameter, 1 something to look at, which stands on stderr and in "
        "the file, such as norms that are not stationary, 2 no rules can be written"
    )


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 < (share := float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)) < 1:
            return share
    raise argparse.ArgumentTypeError(
        f"{text!r} is no share of the steps: a number above 0 and below 1, such as 0.01 for one step in a hundred"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--format",
        choices=("csv", "jsonl", "parquet"),
        required=True,
        help="csv has values only; jsonl has events as well, and NaN and Infinity as texts; parquet has values "
        "only, with their types, and needs `-o` and pyarrow (pip install 'gradsurgeon[arrow]')",
    )
    _add_output(parser)
    parser.add_argument("--stat", metavar="STAT", help="only this statistic, such as l2")
    parser.add_argument("--rule", metavar="RULE", help="only what this rule recorded")
    parser.add_argument("--name", metavar="PATTERN", help='only these tensors, such as "*.bias"')


def _add_lint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a rule file")
    parser.add_argument(
        "--format",
        choices=("full", "concise", "json", "github", "sarif"),
        default="full",
        help="full (the default) and concise are for people, json is documented and stable, github "
        "annotates the lines of a pull request, sarif 2.1.0 is for code scanning",
    )
    _add_output(parser)
    parser.add_argument(
        "--fail-on",
        choices=("error", "warning", "never"),
        default="error",
        help="what makes the exit code 1, default: error; a file that cannot be read makes it 2",
    )
    _add_params_file(parser)
    _add_import(parser)


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        action="append",
        dest="modules",
        default=[],
        metavar="MODULE",
        help="import a module, and so run it, for the actions and statistics that it defines; the "
        "current folder is searched for it; may be given several times",
    )


def _add_names(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    _add_params_file(group)
    _add_model(group)


def _add_params_file(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--params",
        metavar="FILE",
        help="the names of the model: params.json as `gradsurgeon params` writes it, *.safetensors, or "
        "*.index.json beside the weights; needs neither torch nor the model",
    )


def _add_model(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="a function or class that returns the model, or the model itself, such as "
        "train.net:build; the current folder is searched for it",
    )


def _add_params(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_output(parser)
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="write nothing: tell whether FILE is that of the model; without --model whether it is as it "
        "was written",
    )


def _add_diff(parser: argparse.ArgumentParser) -> None:
    for name in ("old", "new"):
        parser.add_argument(name, metavar=name.upper(), help=_RULE_FILE)
    _add_names(parser)
    parser.add_argument(
        "--format",
        choices=("text", "markdown", "json"),
        default="text",
        help="markdown is for a comment on a pull request, json is documented and stable; default: text",
    )
    parser.add_argument(
        "--exit-code", action="store_true", help="exit with 1 where the effect differs"
    )
    _add_import(parser)
