"""`gradsurgeon run ...`: from the command line to plain Python, with the rules in the environment.

The launcher replaces itself, so no wrapper process remains: arguments, exit code, signals, tracebacks and
`__main__` are as in plain Python, and all children inherit the environment.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradsurgeon.errors import printable
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import DISABLE, RULES, Settings, is_on
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
    if problem := next(_problems(rules, arguments), ""):
        return _fail(problem)
    environment = _settings(rules, arguments).environment(os.environ)
    if arguments.print_env:
        _print_difference(environment)
        return 0
    if (flag := _blocking_flag()) and target[0] != "--":
        why = f"with {flag} Python looks at neither PYTHONPATH nor sitecustomize: leave {flag} out"
        if arguments.strict:
            return _fail(f"the rules cannot get into the script: {why}")
        say(f"the script runs on without rules: {why}")
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


def _problems(rules: str, arguments: argparse.Namespace) -> Iterator[str]:
    if not rules:
        yield f"no rules are given: pass `--rules FILE`, or set {RULES}"
    elif not Path(rules).is_file():
        yield f"{printable(rules)}: there is no such rule file"
    if arguments.record and job.is_taken(Path(arguments.record)):
        yield f"{printable(arguments.record)} holds a run already: name another directory, or remove it"
    if arguments.resume:
        folder, shown = Path(arguments.resume), printable(arguments.resume)
        if not (folder / RUN_FILE).is_file():
            yield f"--resume: {shown} is no run directory"
        if not any(folder.glob(state_name("*"))):
            yield (
                f"--resume: {shown} holds no state to resume from: the run was killed within its first minute, or an "
                "older version wrote it; pass `--start-step N` instead"
            )
    yield from (f"--sink: {reason}" for sink in arguments.sink if (reason := why_no_sink(sink)))


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of the launcher, and the script with its arguments: from the first other word on."""
    words = list(argv)
    script = 0
    while script < len(words):
        word = words[script]
        if word in ("--", "-m") or not word.startswith("-") or word == "-":
            break
        script += 2 if word in _WITH_VALUE else 1
    return words[:script], words[script:]


def script_command(target: Sequence[str]) -> list[str]:
    """Return the command that runs a script as plain Python would, with the flags of this interpreter."""
    return [sys.executable, *_flags(), *target]


def _flags() -> list[str]:
    # `subprocess` and `multiprocessing` hand on the same flags: -O, -W, some -X and the like.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    # They omit -u, with which `torchrun` starts its workers so that no output waits in a buffer.
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
    """Return the flag of this interpreter that keeps rules out of scripts; empty if there is none."""
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
    environment |= launch_status.variables(environment, program)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":
        # On Windows, `execve` starts another process and ends this one first.
        return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603
    try:
        os.execve(program, command, environment)  # noqa: S606 # the user asked for this command
    except OSError as error:
        return _fail(f"{printable(program)}: {error.strerror}")


def _print_difference(environment: dict[str, str]) -> None:
    for key, value in environment.items():
        if os.environ.get(key) != value:
            # Written as bytes, because a path need not be text.
            sys.stdout.buffer.write(os.fsencode(f"export {key}={shlex.quote(value)}\n"))


def _fail(text: str) -> int:
    print(f"gradsurgeon run: {text}", file=sys.stderr)  # noqa: T201 # a command line prints
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradsurgeon run",
        usage=_USAGE,
        description="Run a training script with rules on it, without editing it.",
        epilog="The exit code is the script's own; with --strict it is 2 if a rule, or all rules, could not act. "
        "GRADSURGEON_DISABLE=1 turns everything off.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rules", metavar="FILE", help=f"the rule file; default: the file in {RULES}")
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
        help="load what the rules of this run had learnt, and continue its step count",
    )
    add(
        "--start-step",
        metavar="N",
        type=_step,
        help="number of the first update; with --resume, needed if the script's checkpoint is older than the end "
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
        help="print the plan at the first step, write params.json, and stop",
    )
    add("--pdb", action="store_true", help="open the debugger at the update that a trap stops")
    add(
        "--quiet",
        action="store_true",
        help="print no header and no summary: only errors, warnings, traps and skips",
    )
    add("--strict", action="store_true", help="stop if the rules cannot act on the script")
    add(
        "--print-env",
        action="store_true",
        help="print the variables, PYTHONPATH included, with which plain `python` does the same, and stop",
    )
    return parser


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps, 0 or more")
    return int(text)
