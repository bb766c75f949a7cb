"""What a change of one rule means: looser or tighter, in other steps, after other rules, under another name. Pure."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from gradsurgeon.actions import FreezeRule, Rule, written
from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count

Ids = tuple[str, ...]
Kind = Literal["looser", "tighter", "schedule", "renamed", "order", "other"]
# Bounds, and whether a larger number lets more through.
_LARGER_IS_LOOSER = {
    "max_norm": True,
    "max": True,
    "min": False,
    "above.sigmas": True,
    "above.times": True,
    "above.percentile": True,
    "above.norm": True,
    "give_up_after": True,
}


class Change(NamedTuple):
    """An option, named with a dot into `above`, or the rules on a tensor; of an option ``None`` if it is not given."""

    name: str
    before: Any
    after: Any


class Meaning(NamedTuple):
    """One consequence of a change: ``factor`` is new over old."""

    kind: Kind
    field: str
    factor: float | None
    text: str


class OrderChange(NamedTuple):
    """Two rules that act in another order than before on some tensors."""

    first: str
    second: str
    tensors: int

    @property
    def text(self) -> str:
        first = printable(self.first)
        second = printable(self.second)
        return f"order: {first} now acts before {second} (it acted after it), on {count(self.tensors, 'tensor')}"


def meaning_of(old: Rule, new: Rule, option: Change) -> Meaning:
    """Return what a changed option of a rule means."""
    name, before, after = option
    if name == "steps":
        verb = "frozen" if isinstance(new, FreezeRule) else "acts"
        text = f"{verb} {old.steps.in_words} -> {new.steps.in_words}"
        return Meaning("schedule", name, None, text)
    is_looser = _LARGER_IS_LOOSER.get(name)
    are_numbers = isinstance(before, int | float) and isinstance(after, int | float)
    if is_looser is None or not are_numbers:
        return Meaning("other", name, None, f"{written(before)} -> {written(after)}")
    kind: Kind = "looser" if (after > before) == is_looser else "tighter"
    # A bound that changes its sign is no multiple.
    if before * after <= 0:
        return Meaning(kind, name, None, kind)
    factor = after / before
    return Meaning(kind, name, factor, f"{kind} by a factor of {max(factor, 1 / factor):.3g}")


def order_changes(chains: Sequence[Change]) -> list[OrderChange]:
    """Return the pairs of rules that act in another order than before, those on most tensors first."""
    pairs: Counter[tuple[str, str]] = Counter()
    # Most tensors have the chains of others.
    alike = Counter((chain.before, chain.after) for chain in chains)
    for (before, after), tensors in alike.items():
        places = {rule: place for place, rule in enumerate(before)}
        common = [rule for rule in after if rule in places]
        for first, second in pairwise(common):
            if places[first] > places[second]:
                pairs[first, second] += tensors
    return [OrderChange(*pair, number) for pair, number in pairs.most_common()]
