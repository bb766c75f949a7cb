"""Find the problems of rule files, except the problems that comments suppress.

``# gradsurgeon: ignore[check-id]`` suppresses the problems of a check that are shown at its own line.
"""

import re
from collections.abc import Iterator, Sequence

from gradsurgeon import schema, source
from gradsurgeon.errors import Place, Problem, RuleFileError, did_you_mean
from gradsurgeon.packs import PREFIX
from gradsurgeon.planning import Manifest
from gradsurgeon.review.checks import CHECKS, Finding
from gradsurgeon.review.lint_context import MAX_COMPARED, LintContext
from gradsurgeon.review.reading_checks import READING_CHECKS
from gradsurgeon.schema import Inspection, Located, RuleSet, bounded

_UNUSED = "unused-suppression"
_COMMENT = re.compile(r"(?<!\S)#\s*gradsurgeon:\s*ignore\b(?:\[([^\]\n]*)\])?")


def lint(path: str, manifest: Manifest | None = None) -> list[Problem]:
    """Return all problems of a file and its includes; an unreadable file is one of the problems."""
    try:
        document = source.read(path)
    except RuleFileError as error:
        return list(error.problems)
    return lint_rules(schema.inspect(document), manifest)


def lint_rules(inspected: Inspection, manifest: Manifest | None = None) -> list[Problem]:
    """Return the problems of rules that were read, in the order of files and lines."""
    order = {one.file: index for index, one in enumerate(inspected.sources)}

    def position(problem: Problem) -> tuple[int, int, int]:
        place = problem.place
        return order.get(place.file, len(order)), place.line, place.col

    suppressions = _Suppressions(
        [one for one in inspected.sources if not one.file.startswith(PREFIX)]
    )
    kept = suppressions.left_of(inspected.problems)
    found = sorted(_problems_of_rules(inspected, manifest), key=position)
    kept += bounded(suppressions.left_of(found))
    if manifest is not None:
        # A comment that suppresses a problem without names is not useless if lint knows the names.
        suppressions.left_of(_problems_of_rules(inspected, None))
    kept += bounded(list(suppressions.useless(checked=inspected.rules is not None)))
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


class _Suppressions:
    """The comments of some files."""

    def __init__(self, sources: Sequence[Located]) -> None:
        # The places of each name in a comment, by file, line and name.
        self._places: dict[tuple[str, int, str], list[Place]] = {}
        self._used: set[tuple[str, int, str]] = set()
        for one in sources:
            for check, place in _comments(one):
                self._places.setdefault((place.file, place.line, check), []).append(place)

    def left_of(self, problems: Iterator[Problem] | Sequence[Problem]) -> list[Problem]:
        """Return the problems that no comment suppresses, and mark the other comments as used."""
        left = []
        for problem in problems:
            key = (problem.place.file, problem.place.line, problem.check)
            if problem.severity == "error" or key not in self._places:
                left.append(problem)
            else:
                self._used.add(key)
        return left

    def useless(self, *, checked: bool) -> Iterator[Problem]:
        """Yield a problem for each name in a comment that suppresses nothing.

        If the rules were not ``checked``, only wrong names are problems.
        """
        severities = {name: check.severity for name, check in (READING_CHECKS | CHECKS).items()}
        for key, places in self._places.items():
            check = key[2]
            if not check:
                message = "the comment names no check"
                hint = "write `# gradsurgeon: ignore[check-id]`"
            elif check not in severities:
                message = f"there is no check `{check[:60]}`"
                hint = did_you_mean(check, severities) or "`gradsurgeon explain` lists all checks"
            elif severities[check] == "error" or check == _UNUSED:
                reason = "" if check == _UNUSED else ": it is an error"
                message, hint = f"`{check}` cannot be suppressed{reason}", "remove the comment"
            elif checked and key not in self._used:
                message = f"`{check}` finds nothing on this line"
                hint = "remove the comment, or write it at the end of the line of the problem"
            else:
                continue
            yield from (Problem(one, _UNUSED, message, hint, "warning") for one in places)


def _comments(source: Located) -> Iterator[tuple[str, Place]]:
    """Yield each name in a comment with its place; an empty name if a comment has none."""
    lines = source.text.removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines, 1):
        if comment := _COMMENT.search(line):
            parts = list(re.finditer(r"[^,\s][^,]*", comment[1] or ""))
            names = [(comment.start(1) + part.start(), part[0].rstrip()) for part in parts]
            for column, name in names or [(comment.start(), "")]:
                text = line.removesuffix("\r")
                yield name, Place(source.file, number, column + 1, text, max(1, len(name)))
