"""`gradsurgeon run ...`: from the command line to plain Python, with the rules in the environment.

The process is replaced, not wrapped: arguments, exit code, signals, tracebacks and `__main__` are those
of plain Python, and children of all kinds inherit the environment.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gradsurgeon.errors import printable
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import DISABLE, RULES, STATUS_FILE, Settings, is_on
from gradsurgeon.sinks.places import FORMS, absolute, why_no_sink
from gradsurgeon.store import job
from gradsurgeon.store.layout import RUN_FILE, state_name

_USAGE = "gradsurgeon run [options] (SCRIPT.py | -m MODULE | -- COMMAND) [arguments ...]"
_WITH_VALUE = ("--rules", "--record", "--resume", "--start-step", "--sink")


def main(argv: Sequence[str]) -> int:
    options, target = split(argv)
    arguments = _parser().parse_args(options)
    if not arguments.print_env and not target:
        return _fail(f"no script is given\nusage: {_USAGE}")
    if is_on(os.environ.get(DISABLE, "")) and not arguments.print_env:
        return _become_target(target, dict(os.environ))
    rules = arguments.rules or os.environ.get(RULES, "")
    problem = _problem(rules, arguments.record) or _problem_of_resuming(arguments.resume)
    if problem := problem or _problem_of_sinks(arguments.sink):
        return _fail(problem)
    environment = _settings(rules, arguments).environment(os.environ)
    if arguments.print_env:
        _print_difference(environment)
        return 0
    is_command = target[0] == "--"
    if (flag := _blocking_flag()) and not is_command:
        why = f"with {flag} Python looks at neither PYTHONPATH nor sitecustomize: leave {flag} out"
        if arguments.strict:
            return _fail(f"the rules cannot get into the script: {why}")
        say(f"the script runs on without rules: {why}")
    environment |= launch_status.variables(environment, command=is_command)
    return _become_target(target, environment)


def _settings(rules: str, arguments: argparse.Namespace) -> Settings:
    return Settings(
        rules=str(Path(rules).absolute()),
        record=str(Path(arguments.record).absolute()) if arguments.record else "",
        dry_run=str(Path("params.json").absolute()) if arguments.dry_run else "",
        start_step=arguments.start_step,
        resume=str(Path(arguments.resume).absolute()) if arguments.resume else "",
        sinks=tuple(map(absolute, arguments.sink)),
        observe=arguments.observe,
        pdb=arguments.pdb,
        quiet=arguments.quiet,
        strict=arguments.strict,
    )


def _problem(rules: str, record: str | None) -> str:
    if not rules:
        return f"no rules are given: pass `--rules FILE`, or set {RULES}"
    if not Path(rules).is_file():
        return f"{printable(rules)}: there is no such rule file"
    if record and job.is_taken(Path(record)):
        return f"{printable(record)} holds a run already: name another directory, or remove it"
    return ""


def _problem_of_resuming(resume: str | None) -> str:
    if not resume:
        return ""
    folder, shown = Path(resume), printable(resume)
    if not (folder / RUN_FILE).is_file():
        return f"--resume: {shown} is no run directory"
    if not any(folder.glob(state_name("*"))):
        return (
            f"--resume: {shown} holds no state to go on from: it was ended by force within its first minute, or "
            "written by an older version; say `--start-step N`"
        )
    return ""


def _problem_of_sinks(given: Sequence[str]) -> str:
    reasons = (why_no_sink(text) for text in given)
    return next((f"--sink: {reason}" for reason in reasons if reason), "")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut a command line in two where the script begins: at the first word that is no option of ours."""
    words = list(argv)
    script = 0
    while script < len(words):
        word = words[script]
        if word in ("--", "-m") or not word.startswith("-") or word == "-":
            break
        script += 2 if word in _WITH_VALUE else 1
    return words[:script], words[script:]


def script_command(target: Sequence[str]) -> list[str]:
    """Return the command that runs a script as plain Python would, with the flags of this one."""
    return [sys.executable, *_flags(), *target]


def _flags() -> list[str]:
    # What `subprocess` and `multiprocessing` themselves hand on: -O, -W, some -X and the like.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    # What they do not. `torchrun` starts its workers with -u: their output is not to wait in a buffer.
    if getattr(sys.__stdout__, "write_through", False):
        flags.append("-u")
    if sys.flags.inspect:
        flags.append("-i")
    for key, value in sys._xoptions.items():  # noqa: SLF001 # the documented name
        option = key if value is True else f"{key}={value}"
        if option not in flags:
            flags += ["-X", option]
    return flags


def _blocking_flag() -> str:
    """Return the flag of this interpreter, handed on to scripts, with which rules cannot get in."""
    flags = sys.flags
    given = {"-I": flags.isolated, "-E": flags.ignore_environment, "-S": flags.no_site}
    return next((flag for flag, on in given.items() if on), "")


def _become_target(target: list[str], environment: dict[str, str]) -> int:
    command = target[1:] if target[0] == "--" else script_command(target)
    if not command:
        return _fail("nothing follows `--`: a command is expected, such as torchrun")
    program = shutil.which(command[0])
    if program is None:
        return _fail(f"{printable(command[0])}: there is no such command")
    if target[0] == "--" and STATUS_FILE in environment and STATUS_FILE not in os.environ:
        launch_status.leave_observer(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":
        # There `execve` starts another process and ends this one before it.
        return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603
    try:
        os.execve(program, command, environment)  # noqa: S606 # that is what was asked for
    except OSError as error:
        return _fail(f"{printable(program)}: {error.strerror}")


def _print_difference(environment: dict[str, str]) -> None:
    for key, value in environment.items():
        if os.environ.get(key) != value:
            # As bytes: a path need not be text.
            sys.stdout.buffer.write(os.fsencode(f"export {key}={shlex.quote(value)}\n"))


def _fail(text: str) -> int:
    print(f"gradsurgeon run: {text}", file=sys.stderr)  # noqa: T201 # a command line prints
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradsurgeon run",
        usage=_USAGE,
        description="Run a training script with rules on it, without editing it.",
        epilog="The exit code is that of the script, but for --strict: 2 where a rule, or all of them, could not "
        "act. GRADSURGEON_DISABLE=1 turns everything off.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rules", metavar="FILE", help=f"the rule file; that of {RULES} if not given")
    add("--record", metavar="DIR", help="write records to this run directory")
    add(
        "--sink",
        metavar="KIND:PLACE",
        action="append",
        default=[],
        help=f"send aggregates and events to a tracker while training goes on: {', '.join(FORMS)}; may be "
        "given several times",
    )
    add(
        "--resume",
        metavar="RUN",
        help="go on from what the rules of this run had learnt, and count on from its last update",
    )
    add(
        "--start-step",
        metavar="N",
        type=_step,
        help="number of the first update; with --resume, where the checkpoint of the script is older than the end "
        "of that run",
    )
    add(
        "--observe",
        action="store_true",
        help="arm every rule, edit nothing, count what it would do",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the plan at the first step, write params.json, stop",
    )
    add("--pdb", action="store_true", help="open the debugger where a trap stops the update")
    add(
        "--quiet",
        action="store_true",
        help="neither header nor summary: only errors, warnings, traps and skips",
    )
    add("--strict", action="store_true", help="stop where the rules cannot be put on the script")
    add(
        "--print-env",
        action="store_true",
        help="print what a shell has to set so that plain `python` does the same, PYTHONPATH included, and stop",
    )
    return parser


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps, 0 or more")
    return int(text)
