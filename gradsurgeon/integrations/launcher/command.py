"""`gradsurgeon run ...`: from the command line to plain Python, with the rules in the environment; no wrapper process remains."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradsurgeon.errors import ManifestError, printable
from gradsurgeon.integrations.launcher import messages
from gradsurgeon.integrations.launcher.settings import Settings, is_off
from gradsurgeon.language import packs
from gradsurgeon.records.store.layout import is_taken, state_name
from gradsurgeon.sinks.sink import FORMS, absolute, why_no_sink

_USAGE = "gradsurgeon run [options] (SCRIPT.py | -m MODULE | -- COMMAND) [arguments ...]"
# Rules that only look, for a script without rules of its own.
DEFAULT_RULES = "gradsurgeon:debug@1"


def main(argv: Sequence[str]) -> int:
    given = parsed(argv)
    target = given.pop("target")
    if not target:
        return _fail(f"no script is given\nusage: {_USAGE}")
    if is_off(os.environ):
        return _become_target(target, dict(os.environ))
    problem = next(_problems(**given), None)
    if problem is not None:
        return _fail(problem)
    for name in ("rules", "record", "resume", "params", "dry_run"):
        if given[name] and not given[name].startswith(packs.PREFIX):
            given[name] = str(Path(given[name]).absolute())
    given["sinks"] = tuple(absolute(sink) for sink in given["sinks"])
    return _become_target(target, Settings(**given).environment(os.environ))


def _problems(
    rules: str, record: str, resume: str, params: str, sinks: Sequence[str], **_: object
) -> Iterator[str]:
    if rules.startswith(packs.PREFIX):
        try:
            packs.rule_file(rules)
        except packs.IncludeError as error:
            yield f"--rules: {error}"
    elif not Path(rules).is_file():
        yield f"{printable(rules)}: there is no such rule file"
    if sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_site:
        yield "the rules cannot get into the script: start Python without -I, -E and -S"
    if record and is_taken(Path(record)):
        yield f"{printable(record)} holds a run already: name another directory, or remove it"
    if resume and not any(Path(resume).glob(state_name("*"))):
        yield (
            f"--resume: {printable(resume)} holds no state to resume from: it is no run directory, or the run was killed "
            "within its first minute; pass `--start-step N` instead"
        )
    if params:
        from gradsurgeon.language.planning import manifest_file  # noqa: PLC0415 # the launcher alone needs no pydantic

        try:
            manifest_file.read(params)
        except ManifestError as error:
            yield f"--params: {error}"
    yield from _sink_problems(sinks)


def _sink_problems(sinks: Sequence[str]) -> Iterator[str]:
    for sink in sinks:
        reason = why_no_sink(sink)
        if reason:
            yield f"--sink: {reason}"


def parsed(argv: Sequence[str]) -> dict[str, Any]:
    """Return the options of the launcher, and as `target` the script with its arguments: from the first other word on."""
    given = vars(_parser().parse_args(argv))
    module = given.pop("module")
    if module:
        given["target"] = ["-m", *module]
    return given


def script_command(target: Sequence[str]) -> list[str]:
    # `subprocess` and `multiprocessing` hand on the same flags: -O, -W, some -X and the like.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    # They omit -u, with which `torchrun` starts its workers so that no output waits in a buffer.
    if getattr(sys.__stdout__, "write_through", False):
        flags.append("-u")
    return [sys.executable, *flags, *target]


def _become_target(target: list[str], environment: dict[str, str]) -> int:
    command = target[1:]
    if target[0] != "--":
        command = script_command(target)
    if not command:
        return _fail("nothing follows `--`: a command is expected, such as torchrun")
    program = shutil.which(command[0])
    if program is None:
        return _fail(f"{printable(command[0])}: there is no such command")
    environment |= messages.variables(program)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, command, environment)  # noqa: S606 # the user asked for this command
    except OSError as error:
        return _fail(f"{printable(program)}: {error.strerror}")


def _fail(text: str) -> int:
    # In one write: `print` makes two where output is unbuffered, and the lines of ranks would mix.
    sys.stderr.write(f"gradsurgeon run: {text}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradsurgeon run",
        usage=_USAGE,
        description="Run a training script with rules on it, without editing it.",
        epilog="The exit code is the script's own. GRADSURGEON_DISABLE=1 turns everything off.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--rules",
        metavar="FILE",
        default=DEFAULT_RULES,
        help=f"the rule file, or a pack by its name; without it {DEFAULT_RULES}, which only looks",
    )
    add(
        "--import",
        metavar="MODULE",
        action="append",
        dest="modules",
        default=[],
        help="import this module of yours, which defines actions, before the rules are read; may be given several times",
    )
    add("--record", metavar="DIR", default="", help="write records to this run directory")
    add(
        "--sink",
        metavar="KIND:PLACE",
        action="append",
        dest="sinks",
        default=[],
        help=f"send aggregates and events to a tracker: {', '.join(FORMS)}; may be given several times",
    )
    add(
        "--on-event",
        metavar="COMMAND",
        default="",
        help="start this command of the shell for each trap, spike, check finding and for the end, with the event as one line of "
        "JSON on its input; one at a time, each for at most 60 seconds, and at most 100 events wait",
    )
    resume = "load what the rules of this run had learnt, and continue its step count"
    add("--resume", metavar="RUN", default="", help=resume)
    params = "refuse a model whose names, shapes or ties differ from those in this file, with which the rules were reviewed"
    add("--params", metavar="FILE", default="", help=params)
    start_step = "number of the first update, also with --resume if the checkpoint is older"
    add("--start-step", metavar="N", type=_step, help=start_step)
    perturb = "add noise of this size, such as 1e-6: a run for `gradsurgeon compare --noise`"
    add("--perturb", metavar="EPS", type=float, default=0.0, help=perturb)
    add("--seed", metavar="N", type=_step, default=0, help="the seed of that noise")
    observe = "arm every rule, edit nothing, count what it would do"
    add("--observe", action="store_true", help=observe)
    dry_run = "print the plan at the first step, write params.json, and stop"
    add("--dry-run", action="store_const", const="params.json", default="", help=dry_run)
    debugger = "open the debugger where the NaN was made, then at the update that a trap stopped"
    add("--pdb", action="store_true", help=debugger)
    probe = "stop at the first update, and ask the batch what the training does not show: `gradsurgeon probe`"
    add("--probe", action="store_true", help=probe)
    add("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    quiet = "print no header and no summary: only errors, warnings, traps and skips"
    add("--quiet", action="store_true", help=quiet)
    return parser


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return int(text)
