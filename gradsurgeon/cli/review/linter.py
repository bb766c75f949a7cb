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
    order = {located.file: index for index, located in enumerate(inspected.sources)}

    def position(problem: Problem) -> tuple[int, int, int]:
        place = problem.place
        return order.get(place.file, len(order)), place.line, place.col

    suppressed = set(_suppressed(inspected.sources))
    kept = []
    for problem in sorted(_problems_of_rules(inspected), key=position):
        place = problem.place
        if (place.file, place.line, problem.check) not in suppressed:
            kept.append(problem)
    return sorted(dict.fromkeys([*inspected.problems, *bounded(kept)]), key=position)


def _problems_of_rules(inspected: Inspection) -> Iterator[Problem]:
    rules = inspected.rules
    if rules is None:
        return
    context = LintContext(rules)
    for check in CHECKS.values():
        for finding in check.find(context):
            place = rules.place(finding.rule.id, *finding.at)
            message = finding.message
            if place.file.startswith(PREFIX):
                # Users cannot change a pack, but they can change what they include with it.
                within_pack = all(
                    rules.place(rule.id).file == place.file for rule in finding.others
                )
                if within_pack:
                    continue
                place = rules.place_to_correct(finding.rule.id)
                message = f"in this pack, {message}"
            yield Problem(place, check.id, message, finding.hint, check.severity)
    if len(context.compared) < len(context.rules):
        first = context.rules[len(context.compared)]
        message = f"over {MAX_COMPARED} patterns: the rules from here on are not compared"
        yield Problem(rules.place(first.id), "too-large", message, "", "warning")


def _suppressed(sources: Iterable[Located]) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and check of each suppression; a pack cannot suppress anything."""
    for located in sources:
        if located.file.startswith(PREFIX):
            continue
        lines = located.text.removeprefix("\ufeff").split("\n")
        for number, line in enumerate(lines, 1):
            comment = _COMMENT.search(line)
            if comment is None:
                continue
            for check in re.findall(r"[^,\s]+", comment[1]):
                yield located.file, number, check
