"""Checks on the matches and the values of one rule."""

import re
from collections.abc import Iterator

from gradsurgeon.actions import Rule
from gradsurgeon.actions.clamp import Clamp
from gradsurgeon.actions.scale import Scale
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext

_NUMBER = re.compile(r"(?<![0-9])([0-9]+)\*")


class NoMatch(Check):
    """A rule matches nothing in the model whose names `--params` gives to lint.

    Training with such a rule ends with an error before its first step. Most often a name is misspelt, or
    the model has changed and the rule has not.

    Correct the pattern: the message has the nearest names. If a rule is meant for some models only, write
    `optional: true`, or `model:` with the class of the model.
    """

    severity = "error"
    NAMES = ("encoder.fc.weight", "encoder.fc.bias")
    BAD = """
- {id: norms, action: norm-log, params: "encodr.*"}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        return _obstacles(context, "no-match")


class BrokenExpect(Check):
    """A rule matches another number of parameters than its `expect` says.

    Training with such a rule ends with an error before its first step. The number is there so that a pattern
    cannot change its meaning unnoticed, and in the model whose names `--params` gives to lint, it has.

    `gradsurgeon plan` shows the matches of the rule. If they are wrong, correct the pattern; if they are right,
    correct the number.
    """

    severity = "error"
    NAMES = ("fc1.weight", "fc1.bias", "fc2.weight")
    BAD = """
- {id: norms, action: norm-log, params: "fc*", expect: {params: 2}}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        return _obstacles(context, "expect")


class CannotAct(Check):
    """A rule cannot act on its matches, or the names cannot decide what it matches.

    Training with such a rule ends with an error before its first step. With the names of a model, from
    `--params`, the check finds rules on parameters that have no shape yet, that are complex or sparse and do
    not allow the action, or that are sharded so that the rule cannot reach them. It also finds conditions that
    the file of names cannot decide.

    The message says what the rule can do instead. For undecided conditions, give lint the names as
    `gradsurgeon params` writes them.
    """

    severity = "error"
    NAMES = ("fc.weight", "fc.bias")
    BAD = """
- {id: norms, action: norm-log, params: "fc.*", where: {module_type: "Linear"}}  # a file of weights has no classes
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        return _obstacles(context, "cannot-act")


class NumberPrefix(Check):
    """A star right behind a number also matches more digits.

    `layers.1*` means layers 1, 10 to 19, and 100: a pattern that was right for a small model grows with the
    model. With the names of a model, the check reports it only if the model has such a longer number.

    End the number with a dot, as in `layers.1.*`, or write a range: `layers.{10..19}.*`.
    """

    BAD = """
- {id: second-layer, action: norm-log, params: "layers.1*"}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            for key in (rule.target, "exclude"):
                for index, text in enumerate(getattr(rule, key)):
                    number = None if text.startswith("re:") else _NUMBER.search(text)
                    if number is None or not _may_go_on(number[1], context, rule, text):
                        continue
                    digits = number[1][:20]
                    message = f"`{digits}*` means {digits}, {digits}0, {digits}1 and so on"
                    ended = text.replace(number[0], f"{number[1]}.*", 1)
                    hint = f'end the number with a dot: "{ended[:80]}"'
                    yield Finding(rule, (key, index), message, hint)


class BoundOnContributions(Check):
    """A bound at `backward` does not bound the gradient.

    At `backward` a `clamp` or `clip-norm` bounds the contribution of one backward pass. Under gradient
    accumulation the sum can exceed the bound; under DDP each rank bounds its own share before the average.
    So the effect of the rule depends on the number of micro-batches and of ranks.

    Write `at: step` to bound the gradient that the optimizer gets. If you mean to bound each contribution,
    suppress the warning.
    """

    BAD = """
- {id: bounded, action: clamp, params: "*.weight", at: backward, min: -0.1, max: 0.1}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            contribution = rule.target == "params" and rule.point == "backward"
            if contribution and rule.takes_at and not rule.linear:
                message = (
                    f"{rule.action} at `backward` bounds the contribution of each backward pass: under "
                    "accumulation the sum can exceed the bound, and under DDP each rank bounds its own share"
                )
                yield Finding(rule, ("at",), message, "`at: step` bounds the final gradient")


class ClampWithoutZero(Check):
    """The bounds of a clamp of gradients exclude zero.

    With a `min` above 0 or a `max` below 0, every element moves in one direction at every step, even if the loss
    does not depend on it, and training cannot converge. Binding refuses such a rule on sparse gradients, because
    the result would be dense.

    Include 0 in the bounds, such as `min: -0.1` and `max: 0.1`. Often a minus sign is missing.
    """

    BAD = """
- {id: bounded, action: clamp, params: "*.weight", at: step, min: 0.01, max: 0.1}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            # A positive bound makes sense for values, but not for gradients.
            if not isinstance(rule, Clamp) or rule.keeps_zero or not rule.ref.grad:
                continue
            key = "min" if rule.min is not None and rule.min > 0 else "max"
            bound = getattr(rule, key)
            what = "below" if key == "min" else "above"
            message = f"no element may be {what} {bound:g}, so a gradient of 0 becomes {bound:g}"
            hint = "include 0 in the bounds: is a minus sign missing?"
            yield Finding(rule, (key,), message, hint)


class ScaleByZero(Check):
    """A factor of zero does not remove a NaN.

    NaN times 0 is NaN, and so is infinity times 0. A gradient that should be removed because of its non-finite
    elements still reaches the optimizer.

    Use `zero`, which overwrites every element with zero.
    """

    BAD = """
- {id: no-bias, action: scale, params: "*.bias", factor: 0}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.rules:
            if isinstance(rule, Scale) and rule.factor == 0:
                message = "scaling by 0 leaves NaN: NaN times 0 is NaN"
                yield Finding(rule, ("factor",), message, "use `action: zero`, without `factor`")


def _may_go_on(number: str, context: LintContext, rule: Rule, pattern: str) -> bool:
    """Tell whether a pattern matches a name with more digits; without names, it may."""
    if context.matched is None or rule.target == "tensors":
        return True
    hits = context.matched.matcher.names[rule.target].hits(pattern)
    return any(map(re.compile(f"(?<![0-9]){number}[0-9]").search, hits))


def _obstacles(context: LintContext, kind: str) -> Iterator[Finding]:
    if context.matched is None:
        return
    for rule in context.rules:
        for found in context.matched.obstacles(rule.id):
            if found.kind == kind:
                yield Finding(rule, found.at, found.text, found.hint)
