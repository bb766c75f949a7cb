"""The oldest PyTorch that rules run on. Importing this module refuses an older one."""

from __future__ import annotations

import re

import torch

from gradsurgeon.errors import GradSurgeonError

OLDEST = (2, 8)


def check(found: str) -> None:
    """Refuse a version of torch whose hooks are not those that the runtime was written for.

    Raises:
        GradSurgeonError: it is too old; of a version that cannot be read nothing is said.
    """
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise GradSurgeonError(
            f"applying rules needs PyTorch {needed} or newer, this is {found}: hooks of older releases "
            f"behave otherwise; pip install 'torch>={needed}', or lint, plan and diff without it"
        )


check(str(torch.__version__))
