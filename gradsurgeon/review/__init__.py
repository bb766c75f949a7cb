"""Rules as they are reviewed: what is wrong with them, what they change, and how that is written."""

from gradsurgeon import schema, source
from gradsurgeon.errors import Problem, RuleFileError
from gradsurgeon.planning import Manifest
from gradsurgeon.review import linter

__all__ = ["lint"]


def lint(path: str, manifest: Manifest | None = None) -> list[Problem]:
    try:
        document = source.read(path)
    except RuleFileError as error:
        return list(error.problems)
    return linter.lint_rules(schema.inspect(document), manifest)
