"""Find the problems of rule files, except those that ``# gradsurgeon: ignore[check-id]`` suppresses in their line."""

import re
from collections.abc import Iterable, Iterator

from gradsurgeon.cli.review.checks import CHECKS, MAX_COMPARED, LintContext
from gradsurgeon.errors import Problem, RuleFileError
from gradsurgeon.language import schema, source
from gradsurgeon.language.packs import PREFIX
from gradsurgeon.language.schema import Inspection, Located, bounded

_COMMENT = re.compile(r"(?<!\S)#\s*gradsurgeon:\s*ignore\[([^\]\n]*)\]")


def lint(path: str) -> list[Problem]:
    try:
        document = source.read(path)
    except RuleFileError as error:
        return list(error.problems)
    return lint_rules(schema.inspect(document))


def lint_rules(inspected: Inspection) -> list[Problem]:
    order = {one.file: index for index, one in enumerate(inspected.sources)}

    def position(problem: Problem) -> tuple[int, int, int]:
        place = problem.place
        return order.get(place.file, len(order)), place.line, place.col

    found = sorted(_problems_of_rules(inspected), key=position)
    suppressed = _suppressed(one for one in inspected.sources if not one.file.startswith(PREFIX))
    kept = [
        problem
        for problem in found
        if (problem.place.file, problem.place.line, problem.check) not in suppressed
    ]
    return sorted(dict.fromkeys([*inspected.problems, *bounded(kept)]), key=position)


def _problems_of_rules(inspected: Inspection) -> Iterator[Problem]:
    rules = inspected.rules
    if rules is None:
        return
    context = LintContext(rules)
    for check in CHECKS.values():
        for finding in check.find(context):
            place, message = rules.place(finding.rule.id, *finding.at), finding.message
            if place.file.startswith(PREFIX):
                # Users cannot change a pack, but what they include together.
                if all(rules.place(other.id).file == place.file for other in finding.others):
                    continue
                place = rules.place_to_correct(finding.rule.id)
                message = f"in this pack, {message}"
            yield Problem(place, check.id, message, finding.hint, check.severity)
    if len(context.compared) < len(context.rules):
        first = context.rules[len(context.compared)]
        message = f"over {MAX_COMPARED} patterns: the rules from here on are not compared"
        yield Problem(rules.place(first.id), "too-large", message, "", "warning")


def _suppressed(sources: Iterable[Located]) -> set[tuple[str, int, str]]:
    return {
        (one.file, number, check)
        for one in sources
        for number, line in enumerate(one.text.removeprefix("\ufeff").split("\n"), 1)
        if (comment := _COMMENT.search(line))
        for check in re.findall(r"[^,\s]+", comment[1])
    }
