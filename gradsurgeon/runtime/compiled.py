"""What rules need under `torch.compile`: hooks that are not compiled, and code that knows of them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType

from torch import nn

from gradsurgeon import _torch
from gradsurgeon.compiler import Program
from gradsurgeon.errors import BindError
from gradsurgeon.planning import ROOT, named_modules, walk
from gradsurgeon.runtime.journal import Journal


class _Reason:
    """Why a graph breaks at a hook of ours: the rules that act there, as they are by then."""

    def __init__(self, rules: Callable[[Program], Iterable[str]], text: str) -> None:
        self._rules = rules
        self._text = text

    def __str__(self) -> str:
        for one in _attached:
            one.broke = True
        rules = sorted({rule for one in _attached for rule in self._rules(one.program)})
        return self._text.format(rules=", ".join(rules) or "none")


def _on_sites(program: Program) -> list[str]:
    return [rule.id for rule, _ in program.site_rules]


def _on_params(program: Program) -> list[str]:
    own = [rule.id for rules in program.per_tensor.values() for rule in rules]
    return own + [stage.rule.id for stage in (*program.after_backward, *program.at_step)]


# Hooks look at each tensor and write into the books of their session: traced, they would be compiled
# anew for every tensor and every step.
on_site = _torch.uncompiled(
    _Reason(
        _on_sites,
        "gradsurgeon acts here with its rules on modules and tags ({rules}), which cannot be part of a "
        "graph: compile without fullgraph=True, or use rules on parameters",
    )
)
in_backward = _torch.uncompiled(
    _Reason(
        lambda program: [*_on_params(program), *_on_sites(program)],
        "gradsurgeon looks at a gradient here (rules: {rules}), which cannot be part of a graph: let "
        "compiled autograd compile without fullgraph=True, or do without it",
    )
)
at_update = _torch.uncompiled(
    _Reason(
        lambda program: [*_on_params(program), *_on_sites(program)],
        "gradsurgeon acts here, around the update of an optimizer (rules: {rules}), which cannot be "
        "part of a graph: compile the step without fullgraph=True",
    )
)


class Compiled:
    """What a session has to see to where `torch.compile` is in use, now or later.

    Raises:
        BindError: a module with rules is to be part of one graph, which they would break.
    """

    def __init__(self, program: Program, journal: Journal, model: nn.Module) -> None:
        _refuse_whole_graphs(program, model)
        self.program = program
        self._journal = journal
        # Whether a graph broke at a hook of ours, whose code is no use without the hook.
        self.broke = False
        found = named_modules(model)
        hooked = [found[one.name] for one in program.modules]
        self._places = Places(model, hooked)
        self.leaves = {
            forward for module in hooked if (forward := _own_forward(module)) is not None
        }

    def attach(self, step: int) -> None:
        """Let code that was compiled before hooks went onto modules be compiled anew, and say so."""
        _attached.add(self)
        if any(self._places.lie_in(code, kinds) for code, kinds in _torch.compiled_types()):
            _torch.forget_compiled_code()
            rules = dict.fromkeys(
                rule.id for one in self.program.modules for rule in (*one.on_input, *one.on_output)
            )
            text = (
                f"the rules on modules ({', '.join(rules)}) came after the first compiled call, and "
                "compiled code does not notice new hooks: all code that torch.compile has made in this "
                "process was dropped and is compiled anew when it is called; apply the rules before "
                "the first call to compile once"
            )
            self._journal.emit("notice", text, step=step, warn=True)
        _settle_leaves()

    def detach(self, step: int | None) -> None:
        """Let code that was compiled around hooks be compiled anew without them.

        Args:
            step: where the model lives on, the step at which its rules are taken off.
        """
        _attached.discard(self)
        if step is not None and self.broke:
            _torch.forget_compiled_code()
            text = (
                "the rules on modules are gone: all code that torch.compile has made in this process "
                "was dropped and is compiled anew, without their graph breaks, when it is called"
            )
            self._journal.emit("notice", text, step=step)
        for forward in self.leaves:
            _torch.compile_apart(forward, allowed=True)
        _settle_leaves()


class Places:
    """Where modules with rules stand in a model, to find them again in what guards ask for.

    Not the modules themselves: compiled code holds none of them, and a session reaches its model weakly.
    """

    def __init__(self, model: nn.Module, hooked: Iterable[nn.Module]) -> None:
        own = {id(module): type(module) for module in hooked}
        self._kinds = {id(kind): _code(kind) for kind in own.values()}
        self._root = id(type(model)) if id(model) in own else None
        self._steps = {
            (id(type(parent)), key, id(type(child)))
            for parent in model.modules()
            for key, child in parent._modules.items()  # noqa: SLF001 # hides no child
            if child is not None and id(child) in own
        }

    def lie_in(self, code: CodeType, kinds: Mapping[str, int]) -> bool:
        """Tell whether compiled code calls a module that may be one of them.

        Args:
            code: the frame that was compiled.
            kinds: the ids of the classes that its guards ask for, by source.
        """
        return any(self._may_be(code, source, kinds) for source in kinds)

    def _may_be(self, code: CodeType, source: str, kinds: Mapping[str, int]) -> bool:
        kind = kinds[source]
        if kind not in self._kinds:
            return False
        if self._kinds[kind] is code and source == f"L['{code.co_varnames[0]}']":
            return False  # The frame of `forward` alone: its own hooks are called outside of it.
        child = _CHILD.fullmatch(source)
        if child is None or kind == self._root or child["parent"] not in kinds:
            return True
        return (kinds[child["parent"]], child["key"], kind) in self._steps


_CHILD = re.compile(r"(?P<parent>.+)\._modules\['(?P<key>[^']*)'\]")


def _code(kind: type[nn.Module]) -> CodeType | None:
    code: CodeType | None = getattr(kind.forward, "__code__", None)
    return code


_attached: weakref.WeakSet[Compiled] = weakref.WeakSet()


def _settle_leaves() -> None:
    """Keep layers of torch with rules from becoming graphs of their own.

    All layers of a kind share one `forward`, so that each shape would add a graph to it and the limit
    of graphs per function (8) would soon be reached. For one operation a graph gains nothing.
    """
    for forward in {one for each in _attached for one in each.leaves}:
        _torch.compile_apart(forward, allowed=False)


def _own_forward(module: nn.Module) -> FunctionType | None:
    forward = type(module).forward
    alone = type(module).__module__.startswith("torch.nn.") and not any(module.children())
    return forward if alone and isinstance(forward, FunctionType) else None


def _refuse_whole_graphs(program: Program, model: nn.Module) -> None:
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
