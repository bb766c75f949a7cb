"""The checks of `gradsurgeon lint`: while a file is read, and on valid rules, about one rule or about two."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gradsurgeon.actions import Rule, TrapRule, Where, in_order
from gradsurgeon.actions.clip_norm import BOTH_FORMS, BY_ITSELF, clips_by_themselves
from gradsurgeon.actions.scale import CANCELLED, IN_ITS_PLACE, Scale
from gradsurgeon.common.match import contains
from gradsurgeon.errors import Severity, shorten_names
from gradsurgeon.language.schema import RuleSet

# The checks that run while a rule file is read, with the sentence that `explain` and SARIF show.
READING_CHECKS: Mapping[str, str] = {
    "bad-include": "An entry of `include`, or the `file` of a rule, names nothing that can be read.",
    "bad-pattern": "A pattern cannot be read. It may have `*`, `?`, `[0-9]`, `{a,b}` and `{0..11}`, or begin with `re:`.",
    "bad-value": "The value of an option is not allowed: `gradsurgeon explain ACTION` lists the values.",
    "cannot-act": "With `--params`: a rule matches parameters on which it cannot act.",
    "bad-version": "The file is written for an unknown version of the rule language.",
    "duplicate-key": "A mapping holds a key twice.",
    "duplicate-rule-id": "Two rules have the same id.",
    "empty-file": "The file holds no rules.",
    "expect": "With `--params`: a rule matches another number of parameters than it says.",
    "key-type": "A key is not text.",
    "merge-key": "The merge key `<<` is not allowed.",
    "missing-key": "A key that must be given is missing.",
    "no-match": "With `--params`: a rule matches nothing in the model, or, as a warning, one of its patterns.",
    "no-rules": "The list of rules is empty.",
    "not-a-mapping": "The file is not a mapping with `version` and `rules`.",
    "several-documents": "The file holds more than one YAML document.",
    "too-large": "The file is too large, or nested too deeply.",
    "unknown-action": "There is no such action.",
    "unknown-key": "There is no such key.",
    "unmet-requirement": "The file requires another gradsurgeon.",
    "unreadable-file": "The file cannot be read.",
    "wrong-type": "A value is of the wrong type.",
    "yaml-syntax": "The text is not YAML.",
    "yaml-tag": "A YAML tag is not allowed.",
}

# Rules are compared in pairs, pattern by pattern, and a file may hold thousands of rules.
MAX_COMPARED = 400


class LintContext:
    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules.rules
        self._order = [rule.id for rule in in_order(self.rules)]
        # The rules that are compared with each other: all of them, except in a huge file.
        self.compared = self.rules
        if sum(len(rule.patterns) + len(rule.exclude) for rule in self.rules) > MAX_COMPARED:
            self.compared = ()

    def acts_before(self, first: Rule, second: Rule) -> bool:
        return self._order.index(first.id) < self._order.index(second.id)

    def overlap(self, first: Rule, second: Rule) -> bool:
        """Tell whether both rules certainly act on a common tensor in a common step."""
        covered = [*_covered_patterns(first, second), *_covered_patterns(second, first)]
        return bool(covered) and first.steps.meets(second.steps)

    def covers(self, wide: Rule, narrow: Rule) -> bool:
        """Tell whether ``wide`` certainly acts on every tensor of ``narrow``, in every step of ``narrow``."""
        if wide.when not in (None, narrow.when) or not wide.steps.covers(narrow.steps):
            return False
        return list(_covered_patterns(wide, narrow)) == list(narrow.patterns)


def _covered_patterns(wide: Rule, narrow: Rule) -> Iterator[str]:
    """Yield the patterns of ``narrow`` by which it selects only names that ``wide`` certainly selects too."""
    # Each condition of the wide rule must also be a condition of the narrow one.
    is_narrower = (
        (wide.target, wide.ref) == (narrow.target, narrow.ref)
        and wide.where in (Where(), narrow.where)
        and wide.model in (None, narrow.model)
        and set(wide.exclude) <= set(narrow.exclude)
    )
    for text in narrow.patterns:
        if is_narrower and any(contains(pattern, text) for pattern in wide.patterns):
            yield text


class LintFinding(NamedTuple):
    """What a check has found in the rules of a file."""

    rule: Rule  # the rule at which it is shown
    at: tuple[str | int, ...]  # the option of the rule in its file, such as ``("steps", "every")``
    message: str
    hint: str
    others: Sequence[Rule] = ()  # further rules that the finding is about


_Find = Callable[[LintContext], Iterator[LintFinding]]


class LintCheck(NamedTuple):
    """A check on valid rules."""

    find: _Find  # its name is the name of the check, its docstring the page
    # `warning`: probably a mistake. `note`: a fact worth knowing.
    severity: Severity
    bad: tuple[str, ...]  # rules in which the check finds something

    @property
    def id(self) -> str:
        return self.find.__name__.replace("_", "-")

    @property
    def page(self) -> str:
        return inspect.cleandoc(self.find.__doc__ or "")


_checks: dict[str, LintCheck] = {}


def _check(*bad: str, severity: Severity = "warning") -> Callable[[_Find], _Find]:
    def add(find: _Find) -> _Find:
        check = LintCheck(find, severity, bad)
        _checks[check.id] = check
        return find

    return add


_NUMBER = re.compile(r"(?<![0-9])([0-9]+)\*")


@_check('{id: second-layer, action: norm-log, params: "layers.1*"}')
def number_prefix(context: LintContext) -> Iterator[LintFinding]:
    """A star right behind a number also matches more digits.

    `layers.1*` means layers 1, 10 to 19, and 100: a pattern that was right for a small model grows with the
    model.

    End the number with a dot, as in `layers.1.*`, or write a range: `layers.{10..19}.*`.
    """
    for rule in context.rules:
        for key in (rule.target, "exclude"):
            for index, text in enumerate(getattr(rule, key)):
                number = _NUMBER.search(text)
                if number is None or text.startswith("re:"):
                    continue
                digits = number[1][:20]
                message = f"`{digits}*` means {digits}, {digits}0, {digits}1 and so on"
                hint = f"end the number with a dot: `{digits}.*`"
                yield LintFinding(rule, (key, index), message, hint)


@_check('{id: bounded, action: clamp, params: "*.weight", at: backward, min: -0.1, max: 0.1}')
def bound_on_contributions(context: LintContext) -> Iterator[LintFinding]:
    """A bound at `backward` does not bound the gradient.

    At `backward` a `clamp` or `clip-norm` bounds the contribution of one backward pass. Under gradient
    accumulation the sum can exceed the bound; under DDP each rank bounds its own share before the average.
    So the effect of the rule depends on the number of micro-batches and of ranks.

    Write `at: step` to bound the gradient that the optimizer gets. If you mean to bound each contribution,
    suppress the warning.
    """
    for rule in context.rules:
        if rule.target != "params" or rule.point != "backward":
            continue
        if rule.takes_at and not rule.linear:
            message = (
                f"{rule.action} at `backward` bounds the contribution of each backward pass: under "
                "accumulation the sum can exceed the bound, and under DDP each rank bounds its own share"
            )
            yield LintFinding(rule, ("at",), message, "`at: step` bounds the final gradient")


@_check('{id: no-bias, action: scale, params: "*.bias", factor: 0}')
def scale_by_zero(context: LintContext) -> Iterator[LintFinding]:
    """A factor of zero does not remove a NaN.

    NaN times 0 is NaN, and so is infinity times 0. A gradient that should be removed because of its non-finite
    elements still reaches the optimizer.

    Use `zero`, which overwrites every element with zero.
    """
    for rule in context.rules:
        if isinstance(rule, Scale) and rule.factor == 0:
            message = "scaling by 0 leaves NaN: NaN times 0 is NaN"
            yield LintFinding(rule, ("factor",), message, "use `action: zero`, without `factor`")


@_check('{id: clipped, action: clip-norm, params: "*", max_norm: 1.0}')
def clip_of_each(context: LintContext) -> Iterator[LintFinding]:
    """A clip without `per` clips each gradient by itself.

    `clip_grad_norm_` of torch, and of most trainings, clips all gradients by their common norm. Without `per` this rule
    bounds the norm of each gradient, so the norm of all can be much larger, and their proportions change.

    Write `per: rule` for one common norm, or `per: parameter` if each gradient shall have its own. In a file in which some
    clip has a `per`, the others mean what they say. A clip of a single parameter, named without `*`, has nothing to choose.
    """
    for rule in clips_by_themselves(context.rules):
        yield LintFinding(rule, ("action",), BY_ITSELF, BOTH_FORMS)


@_check(
    '{id: clipped, action: clip-norm, params: "*", max_norm: 1.0, per: rule}',
    '{id: gentle-head, action: scale, params: "head.*", factor: 0.5}',
)
def effective_order(context: LintContext) -> Iterator[LintFinding]:
    """Two edits of the same gradients take effect in another order than in the file.

    Rules at `backward` act before rules at `step`, whatever their order in the file: the rule above gets the
    gradient after this one. A clip at `step` above a scale at `backward` clips the scaled gradient.

    Put the rules in the order in which they take effect, or give this one the point of the other with
    `at`. The plan shows the effective order for each tensor.
    """
    edits = [rule for rule in context.compared if rule.edits]
    for index, rule in enumerate(edits):
        later = [
            other
            for other in edits[:index]
            if context.acts_before(rule, other) and context.overlap(other, rule)
        ]
        if later:
            message = f"`{rule.id[:60]}` acts at `{rule.point}`, before {_listed(later)} above it in the file"
            hint = "put them in the order in which they act, or choose another `at`"
            yield LintFinding(rule, ("action",), message, hint, later)


@_check(
    '{id: bound, action: clip-norm, params: "*", max_norm: 1.0, per: rule}',
    '{id: spikes, action: spike-trap, params: "*", above: {sigmas: 2.5}}',
)
def judged_before_edits(context: LintContext) -> Iterator[LintFinding]:
    """A trap that judges before all edits is below an edit of the same gradients.

    `spike-trap` judges the gradient as the script hands it over, whatever its place in the file. It does not see
    the result of an edit at `step` above it. If the trap clips, it shortens the edited gradient once more, by a
    factor for the unedited one.

    Put the trap above these edits: then it clips the gradient that it judged, and the edits see the result.
    Edits at `backward` act before the trap judges, wherever they are in the file.
    """
    edits = [rule for rule in context.compared if rule.edits and not rule.judges_first]
    for trap in context.compared:
        if not trap.judges_first or trap.point == "updated":
            continue
        above = [
            edit
            for edit in edits
            if edit.point == trap.point
            and context.acts_before(edit, trap)
            and context.overlap(edit, trap)
        ]
        if above:
            message = f"`{trap.id[:60]}` judges the gradient before the edits of {_listed(above)} above it"
            hint = f"put the {trap.name()} first"
            yield LintFinding(trap, ("action",), message, hint, above)


@_check('{id: clean, action: sanitize, params: "*"}', '{id: guard, action: nan-trap, params: "*"}')
def trap_after_sanitize(context: LintContext) -> Iterator[LintFinding]:
    """A trap cannot trip, because another rule removes every NaN first.

    `nan-trap` checks gradients after each backward pass. If a `sanitize` or a `zero` covers all its tensors, that
    rule has replaced every NaN and every infinity by then. The trap cannot trip, although the file looks as if
    it guarded the run.

    Restrict `sanitize` to the known source of NaN, and let the trap guard the rest. To count the replaced
    elements, put a `norm-log` with `stats: [nonfinite]` and `at: backward` above.
    """
    cleaners = [rule for rule in context.compared if rule.action in ("sanitize", "zero")]
    for trap in context.compared:
        # A trap that judges the final gradient expects it to be sanitized.
        if not isinstance(trap, TrapRule) or trap.judges_first:
            continue
        before = [
            cleaner
            for cleaner in cleaners
            if context.acts_before(cleaner, trap) and context.covers(cleaner, trap)
        ]
        if before:
            message = f"the trap never sees a NaN, because of {_listed(before)}"
            hint = "restrict that rule, or remove the trap"
            yield LintFinding(trap, ("action",), message, hint, before)


@_check('{id: keep-backbone, action: zero, params: "backbone.*"}', severity="note")
def zero_is_not_freeze(context: LintContext) -> Iterator[LintFinding]:
    """A parameter whose gradient is set to zero still moves.

    Weight decay still shrinks the weight, and the momentum of earlier steps still moves it. Adam counts the
    zeros as a gradient in its statistics.

    To keep a parameter unchanged, use `freeze`. To drop the gradient of a loss, use `zero`.
    """
    message = "zero is not freeze: weight decay and momentum still move the weight"
    hint = "to keep a parameter unchanged, use `freeze`"
    for rule in context.rules:
        if rule.action == "zero" and rule.target == "params":
            yield LintFinding(rule, ("action",), message, hint)


@_check('{id: slow-embedding, action: scale, params: "embed.*", factor: 0.1}', severity="note")
def scale_under_adam(context: LintContext) -> Iterator[LintFinding]:
    """A constant factor on gradients changes next to nothing under Adam.

    Adam, AdamW, RMSprop, Adagrad and others divide each gradient by its running size, in which the factor cancels, unless
    weight decay is a part of the gradient. Under SGD the factor is a learning rate of its own. Lint does not know the
    optimizer; `gradsurgeon run --dry-run` does, and names it.

    Use `tensor: update` without `at`, which multiplies what the optimizer did to the weight, under any optimizer.
    """
    for rule in context.rules:
        if isinstance(rule, Scale) and rule.may_be_cancelled:
            yield LintFinding(rule, ("factor",), CANCELLED, IN_ITS_PLACE)


def _listed(rules: Sequence[Rule]) -> str:
    return shorten_names([f"`{rule.id[:60]}`" for rule in rules])


CHECKS = dict(sorted(_checks.items()))
