"""Checks on what two rules do to the same tensors."""

from collections.abc import Iterator, Sequence

from gradsurgeon.actions import FreezeRule, LossRule, Rule, TrapRule
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class CombinedTwice(Check):
    """Two rules certainly combine the losses of the same gradients in the same step.

    A `combine` takes the gradients of single losses and leaves one. A second one would find them gone, so training
    with both ends with an error before its first step.

    Leave the names of one rule out of the other by `exclude`, or give the two `steps` that do not meet: one method
    first and another one later is fine.
    """

    severity = "error"
    BAD = """
- id: surgery
  action: combine
  losses: ["seg", "depth"]
  params: "trunk.*"
  method: upgrad

- id: last-block
  action: combine
  losses: ["seg", "normals"]
  params: "trunk.11.weight"
  method: pcgrad
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        if context.matched is not None:  # what cannot act there is told with the names
            return
        combining = [rule for rule in context.compared if _combines(rule)]
        for index, rule in enumerate(combining):
            others = tuple(other for other in combining[:index] if context.overlap(other, rule))
            if others:
                has = f"ha{'s' if len(others) == 1 else 've'}"
                message = f"it combines gradients that {_listed(others)} {has} combined already"
                hint = "use `exclude`, or give them `steps` that do not meet"
                yield Finding(rule, (rule.target,), message, hint, others)


class EffectiveOrder(Check):
    """Two edits of the same gradients take effect in another order than they stand in the file.

    What acts at `backward` comes before what acts at `step`, wherever it stands: the rule above does
    not get its gradient before this one, but after it. A clip above a scale is a clip of what has been
    scaled.

    Put the rules in the order in which they take effect, or give this one the point of the other by
    `at`. The plan shows the effective order for each tensor.
    """

    BAD = """
- id: clipped
  action: clip-norm
  params: "*"
  max_norm: 1.0

- id: gentle-head
  action: scale
  params: "head.*"
  factor: 0.5
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, others in _overlapping_edits(context):
            later = tuple(other for other in others if context.acts_before(rule, other))
            if later:
                stand = f"which stand{'s' * (len(later) == 1)} above it"
                message = f"it acts at `{rule.point}`, before {_listed(later)}, {stand}"
                hint = "put them in the order in which they act, or choose another `at`"
                if isinstance(rule, LossRule):
                    message = f"it acts on single losses, before {_listed(later)}, {stand}"
                    hint = "put it above: the others see the losses combined"
                key = "at" if "at" in rule.model_fields_set else "action"
                yield Finding(rule, (key,), message, hint, later)


class JudgedBeforeEdits(Check):
    """A trap that judges before all edits stands below an edit of the same gradients.

    `spike-trap` judges the gradient as the script hands it over, wherever it stands in the file. What an edit
    at `step` above it has left is not what is compared with the norms before; and where the trap cuts, it
    shortens by the same factor once more what the edit may have shortened already.

    Put the trap above these edits: then what is judged is what is cut, and the edits see what the cut has left.
    Edits at `backward` act before the trap judges, wherever they stand.
    """

    BAD = """
- id: bound
  action: clip-norm
  params: "*"
  max_norm: 1.0
  per: rule

- id: spikes
  action: spike-trap
  params: "*"
  above: {sigmas: 2.5}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in (rule for rule in context.compared if rule.judges_first):
            above = tuple(
                other
                for other in context.compared
                if other.edits
                and not other.judges_first
                and other.point == rule.point
                and context.acts_before(other, rule)
                and context.overlap(other, rule)
                and not _one_is_moot(context, rule, other)
            )
            if above:
                leave = f"leave{'s' * (len(above) == 1)}"
                message = f"it judges what the script hands over, not what {_listed(above)} above it {leave}"
                hint = f"put the {rule.name()} first"
                yield Finding(rule, ("action",), message, hint, above)


class OverlappingEdits(Check):
    """Two rules certainly change the same tensors in the same step.

    Every rule that matches applies; there is no "last match wins". The second one sees what the first
    one has left. Where the names of a model are known, that is exact. Otherwise it is said where a pattern
    of one rule is `*`, is a pattern of the other rule as well, or matches a name that the other rule
    gives without wildcards.

    If both are meant, nothing. Otherwise leave the names of one rule out of the other by `exclude`.
    """

    severity = "note"
    BAD = """
- id: gentle-head
  action: scale
  params: "head.*"
  factor: 0.5

- id: gentle-rest
  action: scale
  params: "*"
  factor: 0.1
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, others in _overlapping_edits(context):
            if others:
                change = f"change{'s' * (len(others) == 1)}"
                message = f"it changes tensors that {_listed(others)} {change} as well"
                hint = "both apply, one after the other: if one is enough, use `exclude`"
                yield Finding(rule, (rule.target,), message, hint, others)


class ShadowedRule(Check):
    """A rule has no effect, because another one zeroes or freezes all that it acts on.

    The rule looks as if it did something. Who removes the other one brings it to life. Found are edits of
    tensors that are certainly zero already, that are set to zero later, or that belong to frozen
    parameters, in every step in which the edit acts.

    Remove one of the two, or let them act on different names or in different `steps`.
    """

    BAD = """
- id: no-bias
  action: zero
  params: "*.bias"

- id: gentle-bias
  action: scale
  params: "fc.bias"
  factor: 0.1
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule in context.compared:
            for other in context.compared:
                if reason := _moot(context, rule, other):
                    hint = "remove one of the two, or give them other names or `steps`"
                    yield Finding(rule, ("id",), f"`{rule.id}` {reason}", hint, (other,))
                    break


class TrapAfterSanitize(Check):
    """A trap waits for what another rule has removed.

    `nan-trap` looks after each backward pass. Where all its tensors are under a `sanitize`, or under a
    `zero`, every NaN and every infinity has been replaced by then: it cannot trip, while the file looks as
    if the run were guarded.

    Narrow `sanitize` down to the known culprit and let the trap guard the rest. To know how often
    there was something to replace, put a `norm-log` with `stats: [nonfinite]` and `at: backward` above.
    """

    BAD = """
- id: clean
  action: sanitize
  params: "*"

- id: guard
  action: nan-trap
  params: "*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        cleaners = [rule for rule in context.compared if rule.action in ("sanitize", "zero")]
        # One that judges the final gradient expects to see it sanitized.
        traps = (rule for rule in context.compared if isinstance(rule, TrapRule))
        for trap in (rule for rule in traps if not rule.judges_first):
            before = tuple(
                rule
                for rule in cleaners
                if context.acts_before(rule, trap) and context.covers(rule, trap)
            )
            if before:
                replace = f"replace{'s' * (len(before) == 1)}"
                message = f"the trap never sees a NaN: {_listed(before)} {replace} it before"
                hint = "narrow that rule down, or remove the trap"
                yield Finding(trap, ("action",), message, hint, before)


class ZeroIsNotFreeze(Check):
    """A parameter whose gradient is set to zero still moves.

    The optimizer goes on with what it has: weight decay shrinks the weight, and the momentum of
    earlier steps carries it on. The gradient counts as one of zeros in the statistics of Adam.

    To keep a parameter as it is, use `freeze`. To drop what a loss contributes to it, `zero` is right.
    """

    severity = "note"
    BAD = """
- id: keep-backbone
  action: zero
  params: "backbone.*"
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        message = "zero is not freeze: weight decay and momentum still move the weight"
        hint = "to keep a parameter as it is use `freeze`"
        for rule in context.rules:
            if rule.action != "zero" or rule.target != "params":
                continue
            if not any(_moot(context, rule, by) for by in context.compared):
                yield Finding(rule, ("action",), message, hint)


def _overlapping_edits(context: LintContext) -> Iterator[tuple[Rule, tuple[Rule, ...]]]:
    """Yield each edit with the edits above it that certainly change the same tensors."""
    edits = [rule for rule in context.compared if rule.edits]
    for index, rule in enumerate(edits):
        others = (
            other
            for other in edits[:index]
            if not _one_is_moot(context, rule, other)
            and not (_combines(rule) and _combines(other))
            and context.overlap(other, rule)
        )
        yield rule, tuple(others)


def _combines(rule: Rule) -> bool:
    return isinstance(rule, LossRule) and rule.edits


def _listed(rules: Sequence[Rule]) -> str:
    shown = [f"`{rule.id[:60]}`" for rule in rules[:3]]
    if len(rules) > len(shown):
        shown.append(f"{len(rules) - len(shown)} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _one_is_moot(context: LintContext, first: Rule, second: Rule) -> bool:
    return bool(_moot(context, first, second) or _moot(context, second, first))


def _moot(context: LintContext, rule: Rule, by: Rule) -> str:
    """Return why a rule has no effect beside another one; empty if it has one, or may have."""
    if rule is by or by.action not in ("zero", "freeze") or not context.covers(by, rule):
        return ""
    first = context.acts_before(by, rule)
    if by.action == "freeze":
        if rule.edits or (isinstance(rule, FreezeRule) and first):
            return f"does nothing: `{by.id}` keeps the optimizer off these parameters"
        return ""
    if not rule.edits:
        return ""
    if first:
        return (
            f"does nothing: `{by.id}` has set all of it to zero before" if rule.keeps_zero else ""
        )
    # Of two that zero the same, the later one is superfluous, as the first branch says.
    return "" if rule.action == "zero" else f"has no effect: `{by.id}` sets all of it to zero later"
