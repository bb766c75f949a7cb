"""What rules need under `torch.compile`: hooks that are not compiled, and code that knows of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from threading import RLock
from types import FunctionType

from torch import nn

from gradsurgeon import _torch
from gradsurgeon.actions import Rule
from gradsurgeon.compiler import Program
from gradsurgeon.errors import BindError
from gradsurgeon.planning import ROOT, named_modules, walk
from gradsurgeon.runtime.event_log import EventLog


class _Reason:
    """Why a graph breaks at a hook of ours: the rules that act there, as they are by then."""

    def __init__(self, rules_of: Callable[[Program], Iterable[Rule]], text: str) -> None:
        self._rules_of = rules_of
        self._text = text

    def __str__(self) -> str:
        # Torch makes a text of the reason where a graph breaks, and only there.
        sessions = _all_attached()
        for session in sessions:
            session.broke = True
        rules = {rule.id for session in sessions for rule in self._rules_of(session.program)}
        return self._text.format(rules=", ".join(sorted(rules)) or "none")


# Hooks look at each tensor and write into the books of their session: traced, they would be compiled
# anew for every tensor and every step.
uncompiled_in_forward = _torch.uncompiled(
    _Reason(
        lambda program: [rule for rule, _ in program.site_rules],
        "gradsurgeon acts here with its rules on modules and tags ({rules}), which cannot be part of a "
        "graph: compile without fullgraph=True, or use rules on parameters",
    )
)
in_backward = _torch.uncompiled(
    _Reason(
        lambda program: program.rules,
        "gradsurgeon looks at a gradient here (rules: {rules}), which cannot be part of a graph: let "
        "compiled autograd compile without fullgraph=True, or do without it",
    )
)
uncompiled_at_step = _torch.uncompiled(
    _Reason(
        lambda program: program.rules,
        "gradsurgeon acts here, around the update of an optimizer (rules: {rules}), which cannot be "
        "part of a graph: compile the step without fullgraph=True",
    )
)


class CompileSupport:
    """What a session has to see to where `torch.compile` is in use, now or later.

    Raises:
        BindError: a module with rules is to be part of one graph, which they would break.
    """

    def __init__(self, program: Program, event_log: EventLog, model: nn.Module) -> None:
        _refuse_whole_graphs(program, model)
        self.program = program
        self._event_log = event_log
        # Whether a graph broke at a hook of ours, whose code is no use without the hook.
        self.broke = False
        modules = named_modules(model)
        forwards = (_forward_of_layer(modules[hooked.name]) for hooked in program.modules)
        self.layer_forwards = {forward for forward in forwards if forward is not None}

    def attach(self, step: int) -> None:
        """Let code that was compiled before hooks went onto modules be compiled anew, and say so."""
        with _attaching:
            _attached.add(self)
        # Nothing public says which modules compiled code calls, so that all of it has to go.
        if self.program.modules and _torch.forget_compiled_code():
            rules = [rule.id for rule, _ in self.program.site_rules if rule.target == "modules"]
            text = (
                f"the rules on modules ({', '.join(rules)}) came after the first compiled call, and "
                "compiled code does not notice new hooks: all code that torch.compile has made in this "
                "process was dropped and is compiled anew when it is called; apply the rules before "
                "the first call to compile once"
            )
            self._event_log.emit("notice", text, step=step, warn=True)
        _keep_layers_apart()

    def detach(self, step: int | None) -> None:
        """Let code that was compiled around hooks be compiled anew without them.

        Args:
            step: where the model lives on, the step at which its rules are taken off.
        """
        with _attaching:
            _attached.discard(self)
        if step is not None and self.broke:
            _torch.forget_compiled_code()
            text = (
                "the rules on modules are gone: all code that torch.compile has made in this process "
                "was dropped and is compiled anew, without their graph breaks, when it is called"
            )
            self._event_log.emit("notice", text, step=step)
        for forward in self.layer_forwards:
            _torch.compile_apart(forward, allowed=True)
        _keep_layers_apart()


_attached: weakref.WeakSet[CompileSupport] = weakref.WeakSet()
# Models can get their rules in several threads at once, and a set must not grow while it is gone through.
_attaching = RLock()


def _all_attached() -> list[CompileSupport]:
    with _attaching:
        return list(_attached)


def _keep_layers_apart() -> None:
    """Keep layers of torch with rules from becoming graphs of their own.

    All layers of a kind share one `forward`, so that each shape would add a graph to it and the limit
    of graphs per function (8) would soon be reached. For one operation a graph gains nothing.
    """
    for session in _all_attached():
        for forward in session.layer_forwards:
            _torch.compile_apart(forward, allowed=False)


def _forward_of_layer(module: nn.Module) -> FunctionType | None:
    """Return what all layers of a kind share, ``None`` of a module that is no layer of torch."""
    forward = type(module).forward
    is_layer = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    return forward if is_layer and isinstance(forward, FunctionType) else None


def _refuse_whole_graphs(program: Program, model: nn.Module) -> None:
    whole = [path for path, module in walk(model) if _torch.is_compiled_whole(module)]
    refused: dict[str, str] = {}
    for module in program.modules:
        name = "" if module.name == ROOT else module.name
        for path in whole:
            if not path or name == path or name.startswith(f"{path}."):
                for rule in (*module.on_input, *module.on_output):
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
