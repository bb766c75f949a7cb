"""From parameters that are trained to the models they belong to, among all live objects."""

import gc
from collections.abc import Sequence

from torch import Tensor, nn

from gradsurgeon import _live


def roots_of(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the models that parameters belong to: the owners that are nobody's child.

    Parameters have their full names that way, also where the optimizer has only some of them. Losses that
    hold the model they train are passed over.
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
    roots: dict[int, nn.Module] = {}
    for module in modules:
        if any(id(param) in wanted for param in module._parameters.values()):  # noqa: SLF001 # as above
            roots |= {id(root): root for root in _climb(module, parents)}
    return _without_repetition(list(roots.values()), wanted)


def _is_loss(module: nn.Module) -> bool:
    losses = nn.modules.loss._Loss  # noqa: SLF001 # the base of all of torch's
    return isinstance(module, losses) or type(module).__name__.endswith(("Loss", "Criterion"))


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
