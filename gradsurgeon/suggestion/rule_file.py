"""Suggested rules as the text of a rule file, with the evidence for each threshold in comments."""

import re
from collections.abc import Collection, Iterator, Sequence
from textwrap import wrap
from typing import NamedTuple

import yaml

from gradsurgeon.errors import printable
from gradsurgeon.planning.table import count
from gradsurgeon.store.memory import Key
from gradsurgeon.suggestion.recorded import GroupNorms
from gradsurgeon.suggestion.thresholds import BETA, WARMUP, Threshold

_LONGEST_ID, _WIDTH = 60, 100


class SuggestedRule(NamedTuple):
    """A rule, the evidence for its threshold, and doubts about it as texts."""

    id: str
    patterns: Sequence[str]
    params: int
    key: Key
    recorded: GroupNorms
    threshold: Threshold
    share: float
    doubts: Sequence[str]

    def lines(self) -> Iterator[str]:
        for text in self._comments():
            lines = wrap(printable(text), _WIDTH, break_long_words=False, break_on_hyphens=False)
            yield from (f"  # {line}" for line in lines)
        drift, value = self.threshold.drift, self.threshold.value
        yield f"  - id: {self.id}"
        yield f"    action: {'spike-trap' if drift else 'clip-norm'}"
        first, *more = map(_quoted, self.patterns)
        yield f"    params: {first}" if not more else "    params:"
        yield from (f"      - {text}" for text in (first, *more) if more)
        if drift:
            yield "    per: rule"
            yield f"    above: {{sigmas: {_number(value)}, beta: {BETA}, warmup: {WARMUP}}}"
            yield "    then: clip"
        else:
            yield "    at: step"
            yield "    per: rule"
            yield f"    max_norm: {_number(value)}"

    def _comments(self) -> Iterator[str]:
        one, norms = self.threshold, self.recorded
        yield from self.doubts
        out = {"skipped": norms.skipped, "not finite": norms.nonfinite}
        left_out = ", ".join(f"{number:,} {what}" for what, number in out.items() if number)
        point = {"accumulated": "accumulated, before any clip of the script's own"}
        yield (
            f"{count(self.params, 'parameter')}, by `{self.key.rule}` at "
            f"{point.get(self.key.point, self.key.point)}: "
            f"{count(len(norms.norms), 'step')} from {norms.first} to {norms.last}"
            f"{left_out and f', without {left_out}'}"
        )
        if not one.drift:  # the doubts have both quantiles of a drift
            first, second = one.halves
            yield (
                f"{percent(1 - self.share)} quantile of their norm: {one.quantile:.4g} (first half {first:.4g}, "
                f"second half {second:.4g})"
            )
        after = " after the warm-up" if one.drift else ""
        yield f"would have bitten in {one.bites:,} of {count(one.steps, 'step')}{after}: {one.bitten}"


def percent(share: float) -> str:
    return f"{100 * share:.6g}%"


def rule_id(action: str, patterns: Sequence[str], taken: Collection[str]) -> str:
    """Return an id from the words that all patterns share, or else from the words of the first pattern."""
    words = [re.findall(r"[a-z0-9]+", text.lower()) for text in patterns]
    common = [word for word in words[0] if all(word in others for others in words)]
    chosen = common or [*words[0], *(["and", "others"] if len(words) > 1 else [])] or ["all"]
    base = f"{action}-{'-'.join(chosen)}"[:_LONGEST_ID].strip("-")
    numbered = (f"{base}-{number}" for number in range(2, len(taken) + 3))
    return next(text for text in (base, *numbered) if text not in taken)


def _number(value: float | None) -> str:
    """Return a number as YAML 1.1 also reads it: there `1e-07` is a text."""
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', width=float("inf")).rstrip("\n")
