"""The checks of reading a rule file, as code scanning services list them."""

from __future__ import annotations

from dataclasses import dataclass

from gradsurgeon.errors import Severity


@dataclass(frozen=True, slots=True)
class CheckInfo:
    summary: str  # what is wrong, in one sentence
    help: str  # why it matters and what to do
    severity: Severity = "error"


READING_CHECKS: dict[str, CheckInfo] = {
    "bad-include": CheckInfo(
        "An entry of `include` leads to nothing that can be included.",
        "Name a pack with its version, such as gradsurgeon:nan-trap@1, or a file inside the folder "
        "of the including file, each once and in no circle.",
    ),
    "bad-pattern": CheckInfo(
        "A pattern cannot be read.",
        "Patterns know `*`, `?`, `[0-9]`, `{a,b}` and `{0..11}`; regular expressions begin with "
        "`re:` and match the whole name. Those that can take exponential time are refused.",
    ),
    "bad-requires": CheckInfo(
        "The value of `requires` is no comparison of versions.",
        'Write comparisons with commas between them, such as ">=0.1, <0.3".',
    ),
    "bad-value": CheckInfo(
        "An option has a value that it cannot have.",
        "The message says what the option takes; `gradsurgeon explain ACTION` lists all options.",
    ),
    "bad-version": CheckInfo(
        "The file is not written for a version of the rule language that is known here.",
        "Begin the file with `version: 1`, or upgrade gradsurgeon for a newer version.",
    ),
    "duplicate-key": CheckInfo(
        "A key stands twice in one mapping.",
        "YAML readers disagree on which of the two counts: remove one.",
    ),
    "duplicate-rule-id": CheckInfo(
        "Two rules have the same id.",
        "Reviews, diffs and records go by the id, over all included files: rename one of the rules.",
    ),
    "empty-file": CheckInfo(
        "The file holds no rules.",
        "A rule file has `version: 1` and a list of `rules`.",
    ),
    "key-type": CheckInfo(
        "A key is not text.",
        "Quote the key; `no`, `on` and numbers are easily meant as words.",
    ),
    "merge-key": CheckInfo(
        "The merge key `<<` is not allowed.",
        "It hides what a rule holds from its reader and is no part of YAML 1.2: write the keys out.",
    ),
    "missing-key": CheckInfo(
        "A key that must be given is missing.",
        "The message names it; `gradsurgeon explain ACTION` says which options must be given.",
    ),
    "no-rules": CheckInfo(
        "The list of rules is empty.",
        "A file without rules does nothing: add a rule, or remove the file.",
    ),
    "not-a-mapping": CheckInfo(
        "The file is not a mapping with `version` and `rules`.",
        "Begin the file with `version: 1`, then `rules:` and the list of rules.",
    ),
    "several-documents": CheckInfo(
        "The file holds more than one YAML document.",
        "One file holds one document: remove the `---` or split the file.",
    ),
    "too-large": CheckInfo(
        "The file is larger or more deeply nested than is read.",
        "Rule files have limits, so that hostile ones cannot stop a job: split it with `include`.",
    ),
    "unknown-action": CheckInfo(
        "There is no such action.",
        "`gradsurgeon explain` lists all actions.",
    ),
    "unknown-key": CheckInfo(
        "There is no such key.",
        "A misspelt option would do nothing in silence: correct or remove it.",
    ),
    "unmet-requirement": CheckInfo(
        "The file requires another gradsurgeon.",
        "Install a version that meets `requires`.",
    ),
    "unreadable-file": CheckInfo(
        "The file cannot be read.",
        "Name a readable file of UTF-8 text.",
    ),
    "unused-suppression": CheckInfo(
        "A comment suppresses nothing.",
        "It would hide the next problem of the kind: remove it, or correct the name. Errors cannot be "
        "suppressed. A comment counts for its own line; on a line of its own for the line below; behind "
        "the `id` of a rule for the whole rule.",
        "warning",
    ),
    "wrong-type": CheckInfo(
        "A value is of the wrong type.",
        "The message says what was expected; quoted numbers are texts, and patterns are quoted.",
    ),
    "yaml-1.1-lookalike": CheckInfo(
        "A value means something else to tools that read YAML 1.1.",
        "Rule files are YAML 1.2, where `no` is a text and `010` is ten: quote the word or write "
        "the number plainly, so that every reader takes it alike.",
        "warning",
    ),
    "yaml-syntax": CheckInfo(
        "The text is not YAML.",
        "Most often a pattern is not quoted: `*`, `{`, `[`, `!` and `&` mean something to YAML.",
    ),
    "yaml-tag": CheckInfo(
        "A YAML tag is not allowed.",
        "A rule file is data and cannot make objects: remove the tag, or quote the text.",
    ),
}
