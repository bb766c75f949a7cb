"""Suggested rules as the text of a rule file, the evidence in comments, and the reasons for no rule."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from textwrap import wrap

import yaml

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.suggestion.recorded import GroupNorms
from gradsurgeon.suggestion.thresholds import BETA, WARMUP, Threshold, percent, threshold

# With ten expected bites, half as many or twice as many come by chance.
_ENOUGH_BITES = 10
# With fewer norms the statistic has hardly left its warm-up.
_LEAST_STEPS = 2 * WARMUP
_LONGEST_ID, _WIDTH = 60, 100


def judged(recorded: GroupNorms, share: float, rule: str) -> Threshold | str:
    """Return a threshold, or why the group gets no rule."""
    steps, least = len(recorded.norms), max(_LEAST_STEPS, math.ceil(1 / share))
    if steps < least:
        return (
            f"{count(steps, 'step')} are too few for a share of {percent(share)}: it takes {least:,}, and "
            f"{_enough(share):,} for a threshold to count on; record more, or pass a larger --bites"
        )
    if (recorded.norms == 0).sum() >= steps * (1 - share) - 1:
        return "the norm is hardly ever above 0"
    found = threshold(recorded.norms, share)
    if found.drift and recorded.every > 1:
        # Nothing makes up for the steps between. A statistic that forgets as much from one record to the next
        # would bite up to ten times too rarely, and norms filled in between make a slope of a jump.
        return (
            "not stationary, and the statistic of a `spike-trap` moves in every step, but only one step in "
            f"{recorded.every:,} was recorded: record again without `every: {recorded.every}` in `{rule}`"
        )
    if found.drift and found.steps < least - WARMUP:
        positive = count(found.steps + WARMUP, "step")
        return f"not stationary, and the norm is above 0 in only {positive}: record more"
    if found.value is not None:
        return found
    why = "try another --bites" if found.drift else "probably the norms were clipped already"
    return f"no threshold bites in {percent(share)} of the steps (closest: {found.bitten}): {why}"


def _enough(share: float) -> int:
    return math.ceil(_ENOUGH_BITES / share)


def doubts_of(found: Threshold, share: float) -> Iterator[str]:
    if drift := found.drift:
        yield (
            f"not stationary: the {percent(1 - drift.share)} quantile is {drift.first:.4g} in the first half and "
            f"{drift.second:.4g} in the second half"
        )
    if share * found.steps < _ENOUGH_BITES:
        chance = "by chance alone it may bite half as often or twice as often"
        yield f"too few steps: {chance}; {_enough(share):,} steps would do"


def rule_lines(
    name: str, patterns: Sequence[str], found: Threshold, comments: Sequence[str]
) -> Iterator[str]:
    for text in comments:
        lines = wrap(printable(text), _WIDTH, break_long_words=False, break_on_hyphens=False)
        yield from (f"  # {line}" for line in lines)
    yield f"  - id: {name}"
    yield f"    action: {'spike-trap' if found.drift else 'clip-norm'}"
    quoted = [yaml.safe_dump(p, default_style='"', width=math.inf).rstrip("\n") for p in patterns]
    yield f"    params: {quoted[0]}" if len(quoted) == 1 else "    params:"
    yield from (f"      - {text}" for text in quoted if len(quoted) > 1)
    # YAML 1.1 takes `1e-07` for a text.
    value = text if "." in (text := repr(found.value)) else text.replace("e", ".0e")
    if found.drift:
        yield "    per: rule"
        yield f"    above: {{sigmas: {value}, beta: {BETA}, warmup: {WARMUP}}}"
        yield "    then: clip"
    else:
        yield "    at: step"
        yield "    per: rule"
        yield f"    max_norm: {value}"


def evidence(source: str, recorded: GroupNorms, found: Threshold, share: float) -> Iterator[str]:
    """Yield what a threshold was taken from, and what it would have done."""
    out = {"skipped": recorded.skipped, "not finite": recorded.nonfinite}
    left_out = ", ".join(f"{number:,} {what}" for what, number in out.items() if number)
    first, *_, last = recorded.steps
    yield (
        f"{source}: {count(len(recorded.norms), 'step')} from {first} to {last}"
        f"{left_out and f', without {left_out}'}"
    )
    if not found.drift:  # the doubts have both quantiles of a drift
        yield f"{percent(1 - share)} quantile of their norm: {found.quantile:.4g}"
    after = " after the warm-up" if found.drift else ""
    steps = f"{count(found.steps, 'step')}{after}"
    yield f"would have bitten in {found.bites:,} of {steps}: {found.bitten}"


def rule_id(action: str, patterns: Sequence[str], taken: Collection[str]) -> str:
    """Return an id from the words of the first pattern."""
    words = re.findall(r"[a-z0-9]+", " ".join(patterns[:1]).lower()) or ["all"]
    base = f"{action}-{'-'.join(words)}"[:_LONGEST_ID].strip("-")
    numbered = (f"{base}-{number}" for number in range(2, len(taken) + 3))
    return next(text for text in (base, *numbered) if text not in taken)
