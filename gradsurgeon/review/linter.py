"""Find the problems of rule files, except the problems that comments suppress."""

from collections.abc import Iterator

from gradsurgeon import schema, source
from gradsurgeon.errors import Place, Problem, RuleFileError
from gradsurgeon.packs import PREFIX
from gradsurgeon.planning import Manifest
from gradsurgeon.review.checks import CHECKS, Finding
from gradsurgeon.review.lint_context import MAX_COMPARED, LintContext
from gradsurgeon.review.reading_checks import READING_CHECKS
from gradsurgeon.review.suppressions import Suppressions
from gradsurgeon.schema import Inspection, RuleSet, bounded


def lint(path: str, manifest: Manifest | None = None) -> list[Problem]:
    """Return all problems of a file and its includes; an unreadable file is one of the problems."""
    try:
        document = source.read(path)
    except RuleFileError as error:
        return list(error.problems)
    return lint_rules(schema.inspect(document), manifest)


def lint_rules(inspected: Inspection, manifest: Manifest | None = None) -> list[Problem]:
    """Return the problems of rules that were read, in the order of files and lines."""
    own_files = [source for source in inspected.sources if not source.file.startswith(PREFIX)]
    suppressions = Suppressions(own_files)
    order = {source.file: index for index, source in enumerate(inspected.sources)}

    def position(problem: Problem) -> tuple[int, int, int]:
        place = problem.place
        return order.get(place.file, len(order)), place.line, place.col

    kept = [problem for problem in inspected.problems if not suppressions.take(problem)]
    found = sorted(_problems_of_rules(inspected, manifest), key=position)
    kept += bounded([problem for problem in found if not suppressions.take(problem)])
    if manifest is not None:
        # A comment that suppresses a problem without names is not useless if lint knows the names.
        for problem in _problems_of_rules(inspected, None):
            suppressions.take(problem)
    severities = {name: check.severity for name, check in (READING_CHECKS | CHECKS).items()}
    unused = suppressions.unused(severities, checked=inspected.rules is not None)
    kept += bounded(list(unused))
    return sorted(dict.fromkeys(kept), key=position)


def _problems_of_rules(inspected: Inspection, manifest: Manifest | None) -> Iterator[Problem]:
    rules = inspected.rules
    if rules is None:
        return
    context = LintContext(rules, manifest)
    for check in CHECKS.values():
        for finding in check.find(context):
            place = _place(rules, finding, always=check.severity == "error")
            if place is None:
                continue
            message = finding.message
            if rules.place(finding.rule.id).file != place.file:  # the place is the include
                named = f"`{finding.rule.id}`"
                where = "in this pack," if named in message else f"rule {named} of this pack:"
                message = f"{where} {message}"
            yield Problem(place, check.id, message, finding.hint, check.severity)
    if len(context.compared) < len(context.rules):
        first = context.rules[len(context.compared)]
        message = f"over {MAX_COMPARED} patterns: the rules from here on are not compared"
        yield Problem(rules.place(first.id), "too-large", message, "", "warning")


def _place(rules: RuleSet, finding: Finding, *, always: bool) -> Place | None:
    """Return where to show a finding; ``None`` if it concerns the rules of one pack only.

    Users cannot change a pack. So a finding that involves other rules is shown at the entry that includes
    the pack; with ``always``, so is any finding, because it makes the pack unusable for a model.
    """
    file = rules.place(finding.rule.id).file
    alone = all(rules.place(rule.id).file == file for rule in finding.others)
    if file.startswith(PREFIX) and alone and not always:
        return None
    return rules.place_to_correct(finding.rule.id, *finding.at)
