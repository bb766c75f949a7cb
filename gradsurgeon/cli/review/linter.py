"""Find the problems of rule files, except those that ``# gradsurgeon: ignore[check-id]`` suppresses in their line."""

import re
from collections.abc import Iterator

from gradsurgeon.cli.review.checks import CHECKS, MAX_COMPARED, LintContext
from gradsurgeon.errors import Problem, RuleFileError
from gradsurgeon.language import schema, source
from gradsurgeon.language.packs import PREFIX
from gradsurgeon.language.planning import Manifest, MatchedRules, Matcher
from gradsurgeon.language.schema import Inspection, RuleSet, bounded

_COMMENT = re.compile(r"(?<!\S)#\s*gradsurgeon:\s*ignore\[([^\]\n]*)\]")


def lint(path: str, manifest: Manifest | None = None) -> list[Problem]:
    """Return the problems of a file; with the names of a model also what would keep its rules from binding."""
    try:
        document = source.read(path)
    except RuleFileError as error:
        return list(error.problems)
    inspected = schema.Inspection(document)
    problems = lint_rules(inspected)
    if manifest is not None and inspected.rules is not None:
        problems += _unbound(inspected.rules, manifest)
    return problems


def _unbound(rules: RuleSet, manifest: Manifest) -> Iterator[Problem]:
    """Yield why rules do not bind, and as warnings the patterns without effect of those that do."""
    matched = MatchedRules(rules, Matcher(manifest))
    for rule_id, rule in matched.rules.items():
        for obstacle in matched.obstacles(rule_id):
            place = rules.place_to_correct(rule_id, *obstacle.at)
            yield Problem(place, obstacle.kind, obstacle.text)
        if not matched.matches[rule_id].things:
            continue
        for option, text in matched.matcher.names[rule.target].doubts(rule):
            warning = Problem(rules.place(rule_id, option), "no-match", text, "", "warning")
            # The patterns of a pack are for many models.
            is_of_pack = warning.place.file.startswith(PREFIX)
            if option and not is_of_pack and not _is_suppressed(warning):
                yield warning


def lint_rules(inspected: Inspection) -> list[Problem]:
    rules = inspected.rules
    if rules is None:
        return list(inspected.problems)
    order = {located.file: index for index, located in enumerate(inspected.sources)}

    def position(problem: Problem) -> tuple[int, int, int]:
        place = problem.place
        return order[place.file], place.line, place.col

    kept = [problem for problem in _problems_of_rules(rules) if not _is_suppressed(problem)]
    return bounded(sorted(dict.fromkeys(kept), key=position))


def _problems_of_rules(rules: RuleSet) -> Iterator[Problem]:
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
    if not context.compared:
        message = f"over {MAX_COMPARED} patterns: the rules are not compared with each other"
        yield Problem(rules.place(context.rules[0].id), "too-large", message, "", "warning")


def _is_suppressed(problem: Problem) -> bool:
    comment = _COMMENT.search(problem.place.line_text)
    return comment is not None and problem.check in re.findall(r"[^,\s]+", comment[1])
