"""The command line. Only `run`, `replay`, `test` of gradients and `--model` import torch; a command is imported when it is called.

Exit codes: 0 clean, 1 the command found problems in the rules or their bindings, 2 the command could not do
its work: wrong usage, an unreadable file, a model that cannot be built, or a fault of gradsurgeon.
"""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from gradsurgeon.errors import GradSurgeonError, HintedError

_COMMANDS = {
    "run": "Run a training script with rules on it, without editing it.",
    "probe": "Stop a script at its first update, and ask the batch what its training does not show.",
    "lint": "Check rule files: every problem, with its place and a remedy.",
    "test": "Run the tests of rule files: what rules match, what they do to a gradient, how often they would have acted.",
    "plan": "Show what rules bind to in a model, touching nothing.",
    "diff": "Show what a change of a rule file does to a model.",
    "params": "Write the names of a model, to plan rules without it.",
    "explain": "Show what an action does, or what a check of lint means.",
    "schema": "Print the JSON Schema of rule files, for editors.",
    "report": "Show what a run looked like: norms, rules, events.",
    "watch": "Show a run in the terminal while training goes on.",
    "replay": "Run the step that a trap stopped again, and say what went wrong.",
    "compare": "Say where a run parts from a reference, step by step and tensor by tensor.",
    "export": "Write the records of a run, one value per line.",
}
# The statuses with which a shell reports SIGINT and SIGPIPE.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show becomes an escape instead of a traceback.
            stream.reconfigure(errors="backslashreplace")
    if argv is None:
        argv = sys.argv[1:]
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (GradSurgeonError, HintedError) as error:
        return fail(str(error))
    except BrokenPipeError:
        _discard_output()
        return _BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 # no fault of ours may have the exit code of "problems found"
        return fail(_why_stopped(error))
    return code


def _why_stopped(error: Exception) -> str:
    if (
        isinstance(error, OSError) and not error.filename
    ):  # standard output, or a folder that is gone
        _discard_output()
        return f"cannot go on: {error.strerror}"
    if isinstance(error, ImportError) and error.name == "numpy":
        return f"this command needs the library numpy ({error}): pip install 'gradsurgeon[report]'"
    traceback.print_exc()
    return "internal error in gradsurgeon: please report it with the traceback above"


def _discard_output() -> None:
    # The interpreter flushes once more at exit, and must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> int:
    print(f"gradsurgeon: {message}", file=sys.stderr)
    return 2


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        _parser("").print_help(sys.stderr)
        return 2
    name = argv[0]
    if name == "probe":
        name = "run"
        argv = [name, "--probe", "--quiet", *argv[1:]]
    if name == "run":
        # The words after the script belong to the script, so `run` reads its own command line.
        from gradsurgeon.integrations.launcher import command  # noqa: PLC0415 # no other command needs it

        return command.main(argv[1:])
    if name == "--version":
        from gradsurgeon.language.schema import VERSION  # noqa: PLC0415 # `--help` needs no pydantic

        print(f"gradsurgeon {VERSION}")
        return 0
    try:
        arguments = _parser(name).parse_args(argv)
    except SystemExit as end:  # the parser has printed help, or what is wrong
        return 2 if end.code else 0
    modules = getattr(arguments, "modules", ())
    if modules:
        from gradsurgeon.cli.review import model_loading  # noqa: PLC0415 # only `--import` needs it

        for module in modules:
            model_loading.import_module(module)
    return int(import_module(f"gradsurgeon.cli.{arguments.command}").run(arguments))


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser, with the options of the chosen command: its module alone is imported."""
    parser = argparse.ArgumentParser(
        prog="gradsurgeon",
        description="Rules for gradients, as a file that a team reviews like code.",
        epilog="exit codes: 0 clean, 1 problems found, 2 the command could not do its work",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:
            import_module(f"gradsurgeon.cli.{name}").add_options(command)
    return parser
