"""The checks that run while a rule file is read, with the texts that `explain` and SARIF show."""

from dataclasses import dataclass

from gradsurgeon.errors import Severity


@dataclass(frozen=True, slots=True)
class CheckInfo:
    summary: str  # what is wrong, in one sentence
    help: str  # why it matters and what to do
    severity: Severity = "error"


# The first sentence is the summary, the rest is the help.
_TEXTS = {
    "bad-include": "An entry of `include` names nothing that can be included. "
    "Name a pack such as gradsurgeon:nan-trap@1, or a file inside the folder of the including "
    "file.",
    "bad-pattern": "A pattern cannot be read. "
    "Patterns may contain `*`, `?`, `[0-9]`, `{a,b}` and `{0..11}`; `re:` begins a regular "
    "expression.",
    "bad-requires": "The value of `requires` is no comparison of versions. "
    'Write comparisons with commas between them, such as ">=0.1, <0.3".',
    "bad-value": "The value of an option is not allowed. "
    "`gradsurgeon explain ACTION` lists the values of each option.",
    "bad-version": "The file is written for an unknown version of the rule language. "
    "Begin the file with `version: 1`, or upgrade gradsurgeon.",
    "duplicate-key": "A mapping holds a key twice. "
    "YAML readers disagree on which of the two counts: remove one.",
    "duplicate-rule-id": "Two rules have the same id. "
    "Reviews, diffs and records identify rules by id, across all included files: rename one.",
    "empty-file": "The file holds no rules. A rule file has `version: 1` and a list of `rules`.",
    "key-type": "A key is not text. "
    "Quote the key: unquoted `no`, `on` and numbers are often meant as words.",
    "merge-key": "The merge key `<<` is not allowed. "
    "It hides the options of a rule, and is no part of YAML 1.2: write the keys out.",
    "missing-key": "A key that must be given is missing. "
    "`gradsurgeon explain ACTION` says which options must be given.",
    "no-rules": "The list of rules is empty. Add a rule, or remove the file.",
    "not-a-mapping": "The file is not a mapping with `version` and `rules`. "
    "Begin the file with `version: 1`, then `rules:` and the list of rules.",
    "several-documents": "The file holds more than one YAML document. "
    "Remove the `---` or split the file.",
    "too-large": "The file is too large, or nested too deeply. "
    "The limits keep hostile files from stopping a job: split the file with `include`.",
    "unknown-action": "There is no such action. `gradsurgeon explain` lists all actions.",
    "unknown-key": "There is no such key. "
    "A misspelt option would silently do nothing: correct or remove it.",
    "unmet-requirement": "The file requires another gradsurgeon. "
    "Install a version that meets `requires`.",
    "unreadable-file": "The file cannot be read. Name a readable file of UTF-8 text.",
    "wrong-type": "A value is of the wrong type. "
    "Quoted numbers are texts, and patterns are quoted.",
    "yaml-syntax": "The text is not YAML. "
    "Most often a pattern is not quoted: `*`, `{`, `[`, `!`, `&` have a meaning in YAML.",
    "yaml-tag": "A YAML tag is not allowed. "
    "A rule file is plain data and creates no objects: remove the tag, or quote the text.",
}


def _info(text: str) -> CheckInfo:
    summary, _, advice = text.partition(". ")
    return CheckInfo(f"{summary}.", advice)


READING_CHECKS = {check: _info(text) for check, text in _TEXTS.items()}
