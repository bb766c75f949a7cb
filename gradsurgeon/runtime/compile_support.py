"""Support for `torch.compile`: hooks stay uncompiled, and compiled code learns of new hooks."""

from __future__ import annotations

from gradsurgeon import _torch
from gradsurgeon.compiler import Program
from gradsurgeon.recording.event_log import EventLog

# The programs of all attached sessions.
_programs: list[Program] = []


class _Reason:
    """The reason for a graph break at a hook of ours. Torch shows it in an error under ``fullgraph=True``."""

    def __str__(self) -> str:
        rules = sorted({rule.id for program in tuple(_programs) for rule in program.rules})
        return (
            f"gradsurgeon acts here (rules: {', '.join(rules) or 'none'}), and its hooks cannot be part of a graph: "
            "compile without fullgraph=True; in a forward pass, you can instead use rules on parameters"
        )


# Hooks read each tensor and write to the state of their session. If torch traced them, it would recompile
# them for every tensor and every step.
uncompiled = _torch.uncompiled(_Reason())


def begin(program: Program, event_log: EventLog, step: int) -> None:
    """Register a session; if it has rules on modules, drop all compiled code and emit a warning."""
    _programs.append(program)
    # No public interface lists the modules that compiled code calls, so all compiled code must go.
    if program.modules and _torch.forget_compiled_code():
        rules = [rule.id for rule, _ in program.site_rules if rule.target == "modules"]
        text = (
            f"the rules on modules ({', '.join(rules)}) came after the first compiled call, and "
            "compiled code does not notice new hooks: gradsurgeon dropped all compiled code of this "
            "process, and torch.compile compiles it again at the next call; to compile only once, apply "
            "the rules before the first call"
        )
        event_log.emit("notice", text, step=step, warn=True)


def end(program: Program, event_log: EventLog, step: int | None) -> None:
    """Unregister a session; if its model lives on after a step, drop the code compiled around its hooks."""
    if program in _programs:
        _programs.remove(program)
    # Torch gave up on compiling loops around a graph break, and does not retry without this.
    if step is not None and program.modules and _torch.forget_compiled_code():
        text = (
            "the rules on modules are gone: gradsurgeon dropped all compiled code of this process, and "
            "torch.compile compiles it again, without their graph breaks, at the next call"
        )
        event_log.emit("notice", text, step=step)
