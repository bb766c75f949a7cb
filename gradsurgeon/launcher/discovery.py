"""From parameters that are trained to the models they belong to, among all live objects."""

import gc
from collections.abc import Sequence

import torch
from torch import Size, Tensor, nn

from gradsurgeon import _dist, _live


def roots_of(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the models that parameters belong to: the owners that are nobody's child.

    Parameters have their full names that way, also where the optimizer has only some of them. Losses that
    hold the model they train are passed over, and so are modules that keep the model and a copy of it (EMA).
    """
    wanted = {id(param) for param in params}
    # What only waits to be collected must not pass for a model.
    gc.collect()
    modules = _live.instances(nn.Module)
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        if not _is_loss(module):
            for child in module._modules.values():  # noqa: SLF001 # `children` hides shared ones
                parents.setdefault(id(child), []).append(module)
    _pass_over_keepers(parents, wanted)
    roots: dict[int, nn.Module] = {}
    for module in modules:
        if any(id(param) in wanted for param in module._parameters.values()):  # noqa: SLF001 # as above
            roots |= {id(root): root for root in _climb(module, parents)}
    return _without_repetition(list(roots.values()), wanted)


def _is_loss(module: nn.Module) -> bool:
    losses = nn.modules.loss._Loss  # noqa: SLF001 # the base of all of torch's
    return isinstance(module, losses) or type(module).__name__.endswith(("Loss", "Criterion"))


def _pass_over_keepers(parents: dict[int, list[nn.Module]], wanted: set[int]) -> None:
    """Take out of the parents what only keeps a model and frozen copies of it: nobody trains such a whole."""
    for child, above in parents.items():
        parents[child] = [
            keeper
            for keeper in above
            if parents.get(id(keeper)) or not _keeps_copies(keeper, child, wanted)
        ]


def _keeps_copies(keeper: nn.Module, child: int, wanted: set[int]) -> bool:
    # Layers of one shape, of which one is trained, are in containers.
    if isinstance(keeper, nn.Sequential | nn.ModuleList | nn.ModuleDict) or any(
        param is not None
        for param in keeper._parameters.values()  # noqa: SLF001 # `parameters` hides shared ones
    ):
        return False
    children = {id(module): module for module in keeper.children()}
    if (model := children.pop(child, None)) is None:
        return False  # a place for a module that is empty
    copies = [module for module in children.values() if any(True for _ in module.parameters())]
    own = {id(param) for param in model.parameters()}
    alike = all(
        type(copy) is type(model)
        and _shapes(copy) == _shapes(model)
        and not any(p.requires_grad or id(p) in wanted or id(p) in own for p in copy.parameters())
        for copy in copies
    )
    if not copies or not alike:
        return False
    # A whole that is called may have a frozen and a trained part of one shape: only a copy has the same numbers.
    is_called = type(keeper).forward is not nn.Module.forward
    return not is_called or all(_equal(copy, model) for copy in copies)


def _equal(copy: nn.Module, model: nn.Module) -> bool:
    pairs = zip(copy.parameters(), model.parameters(), strict=True)
    return all(
        not (a.is_meta or b.is_meta) and torch.equal(_dist.local(a), _dist.local(b).to(a))
        for a, b in pairs
    )


def _shapes(module: nn.Module) -> dict[str, Size]:
    return {name: param.shape for name, param in module.named_parameters()}


def _climb(module: nn.Module, parents: dict[int, list[nn.Module]]) -> list[nn.Module]:
    roots: list[nn.Module] = []
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        above = parents.get(id(current), [])
        waiting += above
        if not above:
            roots.append(current)
    return roots


def _without_repetition(roots: list[nn.Module], wanted: set[int]) -> list[nn.Module]:
    """Leave out roots whose trained parameters another one has as well: no gradient is edited twice."""
    chosen: list[nn.Module] = []
    covered: set[int] = set()
    held = {id(root): {id(param) for param in root.parameters()} for root in roots}
    # The one that covers most; of several that cover as much, the one that holds least besides.
    order = sorted(roots, key=lambda r: (-len(held[id(r)] & wanted), len(held[id(r)])))
    for root in order:
        if not (held[id(root)] & wanted) <= covered:
            chosen.append(root)
            covered |= held[id(root)]
    return chosen
