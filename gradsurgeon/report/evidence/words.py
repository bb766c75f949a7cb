"""In words: what rules would have done in a recorded run, and what a change of a rule would have changed there."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from gradsurgeon.errors import printable
from gradsurgeon.language.planning.table import count, grid
from gradsurgeon.report.evidence.told import SHARES, Strongest, Told

_NAMES = 3
_DIVIDED = "divided by "
ROUNDED = "the file has some steps of the run, each for several: counts are rounded"
_OF_ONE_RANK = "counted on rank 0 alone: other ranks have losses and contributions of their own"
LATER = (
    "a rule that acts changes the steps after it: they would have been others than those recorded"
)


def table(told: Mapping[str, Told]) -> Iterator[str]:
    """Yield lines for a plan."""
    rows = [("rule", "acts in", "most", "most often")]
    remarks: dict[str, list[str]] = defaultdict(list)
    for rule, result in told.items():
        name = printable(rule)
        if result.missing:
            remarks[f"not told by these records: {result.missing}"].append(name)
        else:
            acts = f"{result.acts:,} of {_steps(result.steps)}"
            if result.acts:
                acts += f" ({_percent(result)})"
            rows.append((name, acts, _strongest(result.largest), _often(result)))
            if result.is_of_one_rank:
                remarks[_OF_ONE_RANK].append(name)
    yield f"on {printable(result.run)}"
    if len(rows) > 1:
        yield from grid(rows)
    for remark, names in remarks.items():
        yield f"  {', '.join(names)}: {printable(remark)}"
    if any(each.is_rounded for each in told.values()):
        yield f"  {ROUNDED}"
    yield f"  {LATER}"


def thresholds(told: Mapping[str, Told]) -> Iterator[str]:
    """Yield lines with the quantiles of what each rule compares with its bound."""
    for rule, result in told.items():
        if not result.thresholds:
            continue
        steps = max(threshold.steps for threshold in result.thresholds)
        yield ""
        yield f"{printable(rule)}: what it compares with its bound in {_steps(steps)}; in brackets the steps in which that bound would have acted"
        rows = [("", *(f"{100 * share:g} %" for share in SHARES[:-1]), "largest")]
        for each in result.thresholds:
            pairs = zip(each.values, each.acts, strict=True)
            cells = [f"{value:.3g} ({acts:,})" for value, acts in pairs]
            rows.append((printable(each.group), *cells))
        yield from grid(rows, right=frozenset(range(1, len(SHARES) + 1)))


def change(before: Told | None, after: Told | None) -> str:
    """Return what a change of a rule would have changed, for one line of a diff."""
    sides = [side for side in (before, after) if side is not None]
    first = sides[0]
    text = _side(first)
    for other in sides[1:]:
        now = _side(other)
        are_alike = first.bites == other.bites and other.steps in (first.steps, 0)
        if are_alike and not (first.missing or other.missing):
            now = _percent(other)
        if now != text:
            text += f" -> {now}"
    text = f"on {first.run}: {text}"
    known = [side for side in sides if not side.missing]
    if any(side.is_rounded for side in known):
        text += " (rounded)"
    if any(side.is_of_one_rank for side in known):
        text += " (on rank 0)"
    factors = [side.largest and side.largest.factor for side in sides]
    if any(factors) and known == sides and all(side.bites for side in sides):
        text += f"; the largest gradient is {_divided(factors)}"
    return text


def _side(told: Told) -> str:
    if told.missing:
        return f"not told by its records: {told.missing}"
    verb = "bites" if told.bites else "acts"
    return f"{verb} in {_percent(told)} of {_steps(told.steps)}"


def _steps(number: int) -> str:
    return count(number, "recorded step")


def _percent(told: Told) -> str:
    if not told.acts:
        return "none"
    return f"{100 * told.share:.3g} %"


def _strongest(largest: Strongest | None) -> str:
    if largest is None:
        return "-"
    text = f"{printable(largest.name)} at step {largest.step:,}"
    if largest.factor is not None:
        text += f": {largest.factor:.3g} times the bound"
    return text


def _often(told: Told) -> str:
    if len(set(told.by_name.values())) <= 1:  # all alike
        return "-"
    most = told.by_name.most_common(_NAMES)
    return ", ".join(f"{printable(name)} {number:,}" for name, number in most)


def _divided(factors: list[float | None]) -> str:
    texts = [f"{_DIVIDED}{factor:.3g}" if factor else "not touched" for factor in factors]
    if factors[0]:
        texts[1:] = [text.removeprefix(_DIVIDED) for text in texts[1:]]
    return " -> ".join(texts)
