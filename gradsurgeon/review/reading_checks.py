"""The checks that run while a rule file is read, with the sentence that `explain` and SARIF show."""

from collections.abc import Mapping

READING_CHECKS: Mapping[str, str] = {
    "bad-include": "An entry of `include` names nothing that can be included.",
    "bad-pattern": "A pattern cannot be read. It may have `*`, `?`, `[0-9]`, `{a,b}` and `{0..11}`, or begin with `re:`.",
    "bad-value": "The value of an option is not allowed: `gradsurgeon explain ACTION` lists the values.",
    "bad-version": "The file is written for an unknown version of the rule language.",
    "duplicate-key": "A mapping holds a key twice.",
    "duplicate-rule-id": "Two rules have the same id.",
    "empty-file": "The file holds no rules.",
    "key-type": "A key is not text.",
    "merge-key": "The merge key `<<` is not allowed.",
    "missing-key": "A key that must be given is missing.",
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
