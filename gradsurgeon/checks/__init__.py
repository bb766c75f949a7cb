"""Checks: whether a training can work. Each check looks at passes and updates, and knows no rule.

`base` holds the facts that a check receives and the findings that it returns. An action returns a check from its
`compile`; `runtime/checks.py` hands it the facts and makes events of its findings.
"""
