"""Find the models of trained parameters among all live objects."""

import gc
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradsurgeon import _dist, _live


def roots_of(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the outermost modules that own parameters, except losses and modules that keep copies of a model (EMA)."""
    wanted = {id(param) for param in params}
    # An unreachable module that the collector has not yet freed must not pass for a model.
    gc.collect()
    modules = _live.instances(nn.Module)
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        if not _is_loss(module):
            for child in module._modules.values():  # noqa: SLF001 # `children` hides shared ones
                parents.setdefault(id(child), []).append(module)
    _pass_over_keepers(parents, wanted)
    roots: list[nn.Module] = []
    seen: set[int] = set()
    for module in modules:
        trains = any(id(param) in wanted for param in module._parameters.values())  # noqa: SLF001 # as above
        waiting = [module] if trains else []
        while waiting:
            current = waiting.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            above = parents.get(id(current), [])
            waiting += above
            if not above:
                roots.append(current)
    return _without_repetition(roots, wanted)


def _is_loss(module: nn.Module) -> bool:
    losses = nn.modules.loss._Loss  # noqa: SLF001 # the base of all of torch's
    return isinstance(module, losses) or type(module).__name__.endswith(("Loss", "Criterion"))


def _pass_over_keepers(parents: dict[int, list[nn.Module]], wanted: set[int]) -> None:
    """Remove parents that only keep a model and frozen copies of it: such a whole is not trained."""
    for child, above in parents.items():
        parents[child] = [
            keeper
            for keeper in above
            if parents.get(id(keeper)) or not _keeps_copies(keeper, child, wanted)
        ]


def _keeps_copies(keeper: nn.Module, child: int, wanted: set[int]) -> bool:
    # A container may hold equal layers of which one is trained.
    if isinstance(keeper, nn.Sequential | nn.ModuleList | nn.ModuleDict) or any(
        param is not None
        for param in keeper._parameters.values()  # noqa: SLF001 # `parameters` hides shared ones
    ):
        return False
    children = {id(module): module for module in keeper.children()}
    if (model := children.pop(child, None)) is None:
        return False  # an empty place for a module
    copies = [module for module in children.values() if any(True for _ in module.parameters())]
    own = {id(param) for param in model.parameters()}
    return bool(copies) and all(
        _equal(copy, model)
        and not any(p.requires_grad or id(p) in wanted or id(p) in own for p in copy.parameters())
        for copy in copies
    )


def _equal(copy: nn.Module, model: nn.Module) -> bool:
    ours, theirs = dict(copy.named_parameters()), dict(model.named_parameters())
    return ours.keys() == theirs.keys() and all(
        not (a.is_meta or b.is_meta) and torch.equal(_dist.local(a), _dist.local(b).to(a))
        for a, b in zip(ours.values(), theirs.values(), strict=True)
    )


def _without_repetition(roots: list[nn.Module], wanted: set[int]) -> list[nn.Module]:
    """Drop roots whose trained parameters all belong to other roots: no gradient is edited twice."""
    chosen: list[nn.Module] = []
    covered: set[int] = set()
    held = {id(root): {id(param) for param in root.parameters()} for root in roots}
    # First the root that covers most; among equals, the root with the fewest other parameters.
    order = sorted(roots, key=lambda r: (-len(held[id(r)] & wanted), len(held[id(r)])))
    for root in order:
        if not (held[id(root)] & wanted) <= covered:
            chosen.append(root)
            covered |= held[id(root)]
    return chosen
