"""Checks on what two rules do to the same tensors."""

from collections.abc import Iterator, Sequence

from gradsurgeon.actions import LossRule, Rule, TrapRule
from gradsurgeon.review.checks._base import Check, Finding
from gradsurgeon.review.lint_context import LintContext


class EffectiveOrder(Check):
    """Two edits of the same gradients take effect in another order than in the file.

    Rules at `backward` act before rules at `step`, whatever their order in the file: the rule above gets the
    gradient after this one. A clip at `step` above a scale at `backward` clips the scaled gradient.

    Put the rules in the order in which they take effect, or give this one the point of the other with
    `at`. The plan shows the effective order for each tensor.
    """

    BAD = """
- {id: clipped, action: clip-norm, params: "*", max_norm: 1.0}
- {id: gentle-head, action: scale, params: "head.*", factor: 0.5}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, others in _overlapping_edits(context):
            later = tuple(other for other in others if context.acts_before(rule, other))
            if later:
                message = f"`{rule.id[:60]}` acts at `{rule.point}`, before {_listed(later)} above it in the file"
                hint = "put them in the order in which they act, or choose another `at`"
                if isinstance(rule, LossRule):
                    message = f"`{rule.id[:60]}` acts on single losses, before {_listed(later)} above it in the file"
                    hint = "put this rule first: the others see the combined losses"
                key = "at" if "at" in rule.model_fields_set else "action"
                yield Finding(rule, (key,), message, hint, later)


class JudgedBeforeEdits(Check):
    """A trap that judges before all edits is below an edit of the same gradients.

    `spike-trap` judges the gradient as the script hands it over, whatever its place in the file. It does not see
    the result of an edit at `step` above it. If the trap clips, it shortens the edited gradient once more, by a
    factor for the unedited one.

    Put the trap above these edits: then it clips the gradient that it judged, and the edits see the result.
    Edits at `backward` act before the trap judges, wherever they are in the file.
    """

    BAD = """
- {id: bound, action: clip-norm, params: "*", max_norm: 1.0, per: rule}
- {id: spikes, action: spike-trap, params: "*", above: {sigmas: 2.5}}
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
            )
            if above:
                edit = f"edit{'s' * (len(above) == 1)}"
                message = f"`{rule.id[:60]}` judges the gradient before {_listed(above)} above it {edit} it"
                hint = f"put the {rule.name()} first"
                yield Finding(rule, ("action",), message, hint, above)


class OverlappingEdits(Check):
    """Two rules certainly change the same tensors in the same step.

    Every matching rule applies; there is no "last match wins". The second rule sees the result of the first.
    With the names of a model, this check is exact. Without names, it reports a rule with the pattern `*`, with
    a pattern of the other rule, or with a pattern that matches a full name in the other rule.

    If you mean both, do nothing. Otherwise exclude the names of one rule from the other.
    """

    severity = "note"
    BAD = """
- {id: gentle-head, action: scale, params: "head.*", factor: 0.5}
- {id: gentle-rest, action: scale, params: "*", factor: 0.1}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        for rule, others in _overlapping_edits(context):
            if others:
                change = f"change{'s' * (len(others) == 1)}"
                message = f"`{rule.id[:60]}` changes tensors that {_listed(others)} also {change}"
                hint = "both apply, one after the other: if one is enough, use `exclude`"
                yield Finding(rule, (rule.target,), message, hint, others)


class TrapAfterSanitize(Check):
    """A trap cannot trip, because another rule removes every NaN first.

    `nan-trap` checks gradients after each backward pass. If a `sanitize` or a `zero` covers all its tensors, that
    rule has replaced every NaN and every infinity by then. The trap cannot trip, although the file looks as if
    it guarded the run.

    Restrict `sanitize` to the known source of NaN, and let the trap guard the rest. To count the replaced
    elements, put a `norm-log` with `stats: [nonfinite]` and `at: backward` above.
    """

    BAD = """
- {id: clean, action: sanitize, params: "*"}
- {id: guard, action: nan-trap, params: "*"}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        cleaners = [rule for rule in context.compared if rule.action in ("sanitize", "zero")]
        # A trap that judges the final gradient expects it to be sanitized.
        traps = (rule for rule in context.compared if isinstance(rule, TrapRule))
        for trap in (rule for rule in traps if not rule.judges_first):
            before = tuple(
                rule
                for rule in cleaners
                if context.acts_before(rule, trap) and context.covers(rule, trap)
            )
            if before:
                replace = f"replace{'s' * (len(before) == 1)}"
                message = f"the trap never sees a NaN: {_listed(before)} {replace} it first"
                hint = "restrict that rule, or remove the trap"
                yield Finding(trap, ("action",), message, hint, before)


class ZeroIsNotFreeze(Check):
    """A parameter whose gradient is set to zero still moves.

    Weight decay still shrinks the weight, and the momentum of earlier steps still moves it. Adam counts the
    zeros as a gradient in its statistics.

    To keep a parameter unchanged, use `freeze`. To drop the gradient of a loss, use `zero`.
    """

    severity = "note"
    BAD = """
- {id: keep-backbone, action: zero, params: "backbone.*"}
"""

    def find(self, context: LintContext) -> Iterator[Finding]:
        message = "zero is not freeze: weight decay and momentum still move the weight"
        hint = "to keep a parameter unchanged, use `freeze`"
        for rule in context.rules:
            if rule.action == "zero" and rule.target == "params":
                yield Finding(rule, ("action",), message, hint)


def _overlapping_edits(context: LintContext) -> Iterator[tuple[Rule, tuple[Rule, ...]]]:
    """Yield each edit with the edits above it that certainly change the same tensors."""
    edits = [rule for rule in context.compared if rule.edits]
    for index, rule in enumerate(edits):
        others = (
            other
            for other in edits[:index]
            if not (_combines(rule) and _combines(other)) and context.overlap(other, rule)
        )
        yield rule, tuple(others)


def _combines(rule: Rule) -> bool:
    return isinstance(rule, LossRule) and rule.edits


def _listed(rules: Sequence[Rule]) -> str:
    shown = [f"`{rule.id[:60]}`" for rule in rules[:3]]
    if len(rules) > len(shown):
        shown.append(f"{len(rules) - len(shown)} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
