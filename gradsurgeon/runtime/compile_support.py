"""What rules need under `torch.compile`: hooks that are not compiled, and code that knows of them."""

from __future__ import annotations

from gradsurgeon import _torch
from gradsurgeon.compiler import Program
from gradsurgeon.recording.event_log import EventLog

# Of all sessions that are attached.
_programs: list[Program] = []


class _Reason:
    """Why a graph breaks at a hook of ours. Torch makes a text of it where a graph must not break."""

    def __str__(self) -> str:
        rules = sorted({rule.id for program in tuple(_programs) for rule in program.rules})
        return (
            f"gradsurgeon acts here (rules: {', '.join(rules) or 'none'}), which cannot be part of a graph: "
            "compile without fullgraph=True, or, in a forward pass, use rules on parameters"
        )


# Hooks look at each tensor and write into the books of their session: traced, they would be compiled
# anew for every tensor and every step.
uncompiled = _torch.uncompiled(_Reason())


def begin(program: Program, event_log: EventLog, step: int) -> None:
    """Let code that was compiled before hooks went onto modules be compiled anew, and say so."""
    _programs.append(program)
    # Nothing public says which modules compiled code calls, so that all of it has to go.
    if program.modules and _torch.forget_compiled_code():
        rules = [rule.id for rule, _ in program.site_rules if rule.target == "modules"]
        text = (
            f"the rules on modules ({', '.join(rules)}) came after the first compiled call, and "
            "compiled code does not notice new hooks: all code that torch.compile has made in this "
            "process was dropped and is compiled anew when it is called; apply the rules before "
            "the first call to compile once"
        )
        event_log.emit("notice", text, step=step, warn=True)


def end(program: Program, event_log: EventLog, step: int | None) -> None:
    """Let code that was compiled around hooks be compiled anew, where the model lives on after a step."""
    if program in _programs:
        _programs.remove(program)
    # Torch has given up on a loop around a graph break, and does not try again by itself.
    if step is not None and program.modules and _torch.forget_compiled_code():
        text = (
            "the rules on modules are gone: all code that torch.compile has made in this process "
            "was dropped and is compiled anew, without their graph breaks, when it is called"
        )
        event_log.emit("notice", text, step=step)
