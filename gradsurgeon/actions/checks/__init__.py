"""Checks: whether a training can work. Each check looks at passes and updates, and knows no rule."""
