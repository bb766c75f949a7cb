"""Which module runs in a replay, and which module built a node of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradsurgeon.planning import named_modules

# The name of a module, and its class.
Place = tuple[str, str]


@dataclass(slots=True, eq=False)
class ModuleCalls:
    """The calls of modules while a call of the model is replayed.

    Attributes:
        running: the modules that run, outermost first, each with the number of the first node that it builds.
        done: the calls that are over, inner calls first, each with the first number and the end of its nodes.
    """

    running: list[tuple[Place, int]] = field(default_factory=list)
    done: list[tuple[Place, int, int]] = field(default_factory=list)

    @contextmanager
    def watched(self, root: nn.Module, came_out: Callable[[str, Any], None]) -> Iterator[None]:
        """Follow the calls of all modules; ``came_out`` gets the name of a module and its output."""
        names: dict[int, str] = {}
        for name, module in named_modules(root).items():
            names.setdefault(id(module), name)

        def before(module: nn.Module, args: Any) -> None:
            del args
            if id(module) in names:
                place = names[id(module)], type(module).__name__
                self.running.append((place, _next_node()))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            del args
            if id(module) in names:
                self.done.append((*self.running.pop(), _next_node()))
                came_out(names[id(module)], output)

        handles = (
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def place(self, node: Any) -> Place:
        """Return the module that runs, or the module that built the running node, if any."""
        if self.running:
            return self.running[-1][0]
        number = -1 if node is None else node._sequence_nr()  # noqa: SLF001 # no public name
        found = (place for place, first, end in self.done if first <= number < end)
        return next(found, ("", ""))


def _next_node() -> int:
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001 # numbers nodes
