"""What rules need under `torch.compile`: hooks that are not compiled, and code that knows of them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from gradsurgeon import _torch
from gradsurgeon.compiler import Program
from gradsurgeon.errors import BindError
from gradsurgeon.planning import ROOT, walk

if TYPE_CHECKING:
    from gradsurgeon.runtime.state import State


class _Reason:
    """Why a graph breaks at a hook of ours: the rules that act in between, as they are by then."""

    def __init__(self) -> None:
        self.states: weakref.WeakSet[State] = weakref.WeakSet()

    def __str__(self) -> str:
        rules = sorted({rule.id for one in self.states for rule, _ in one.program.site_rules})
        named = f"gradsurgeon rules {', '.join(rules)}" if rules else "a gradsurgeon session"
        return (
            f"{named} must act here, which is not possible inside a graph: compile without "
            "`fullgraph=True`, or use rules on parameters, which need no graph break"
        )


_REASON = _Reason()
# Hooks look at each tensor and write into the books of their session: traced, they would be compiled
# anew for every tensor and every step.
uncompiled = _torch.uncompiled(_REASON)


def renew(state: State) -> None:
    """Let code that was compiled before hooks went onto modules be compiled anew, and say so."""
    _REASON.states.add(state)
    rules = _rules(state.program)
    if rules and _torch.forget_compiled_code():
        text = (
            f"the rules on modules ({', '.join(rules)}) came after the first compiled call, and compiled "
            "code does not notice new hooks: all code that torch.compile has made in this process was "
            "dropped and is compiled anew when it is called; apply the rules before the first call to "
            "compile once"
        )
        state.journal.emit("notice", text, step=state.clocks.latest, warn=True)


def release(state: State) -> None:
    """Let code that was compiled around hooks be compiled anew without them."""
    _REASON.states.discard(state)
    if _rules(state.program) and _torch.forget_compiled_code():
        text = (
            "the rules on modules are gone: code that torch.compile has made around their hooks was "
            "dropped and is compiled anew, without graph breaks, when it is called"
        )
        state.journal.emit("notice", text, step=state.clocks.latest)


def _rules(program: Program) -> list[str]:
    own = [rule.id for one in program.modules for rule in (*one.on_input, *one.on_output)]
    return list(dict.fromkeys(own))


def refuse_whole_graphs(program: Program, model: nn.Module) -> None:
    """Refuse rules on modules that are to be compiled as one graph.

    Raises:
        BindError: naming them.
    """
    whole = [path for path, module in walk(model) if _torch.is_compiled_whole(module)]
    refused: dict[str, str] = {}
    for one in program.modules:
        name = "" if one.name == ROOT else one.name
        for path in whole:
            if not path or name == path or name.startswith(f"{path}."):
                for rule in (*one.on_input, *one.on_output):
                    refused.setdefault(rule.id, path)
    if refused:
        raise BindError(
            [
                f"rule {rule}: {f'module {path}' if path else 'the model'} is compiled with "
                "`fullgraph=True`, which allows no graph break, and a rule on a module is one: compile "
                "it without `fullgraph=True`, or use a rule on parameters"
                for rule, path in refused.items()
            ]
        )
