"""The page `rules/reference.md`: what `gradsurgeon explain` prints of actions and checks, output for programs, set-ups."""

import json_forms
import setups

from gradsurgeon.actions import ACTIONS
from gradsurgeon.cli.explain import action_page, check_page, keys, options_table, table
from gradsurgeon.cli.review.checks import CHECKS, READING_CHECKS

HEAD = """\
# Reference

Every option of every rule, every action, and every check of `gradsurgeon lint`. `gradsurgeon explain NAME` prints the same
in a terminal. At the end: [output for programs](#the-report-as-json), and the [tests behind the set-ups](#tests-behind-the-set-ups).
The [guide](README.md) shows how to use them.

<!-- Written by `python tests/unit/test_rules_readme.py` from the actions and checks themselves: do not edit. -->

"""


def page() -> str:
    widest = {key: rule for rule in reversed(ACTIONS.values()) for key in keys(rule, shared=True)}
    shared = dict.fromkeys(key for rule in ACTIONS.values() for key in keys(rule, shared=True))
    lines = ["## Options of every rule", ""]
    lines += options_table([(widest[key], key) for key in shared])
    for rule in ACTIONS.values():
        title, *text = action_page(rule)
        lines += ["", f"## {title}", *text]
    lines += ["", "## Checks", "", "What `lint` asks of rules that can be read."]
    for name in CHECKS:
        title, *text = check_page(name)
        lines += ["", f"### {title}", *text]
    lines += ["", "## Checks of reading", "", "What is wrong with a file that cannot be used, and"]
    lines += ["words that other readers take for something else.", ""]
    lines += table(
        [("check", "finds"), *((f"`{name}`", text) for name, text in READING_CHECKS.items())]
    )
    lines += ["", json_forms.TEXT, "## Tests behind the set-ups", ""]
    lines += [
        "Each row of [the table of set-ups](guide/setups.md) holds because these tests pass.",
        "",
    ]
    lines += table([("set-up", "tests"), *setups.tests_behind(setups.collected())])
    return HEAD + "\n".join(lines) + "\n"
