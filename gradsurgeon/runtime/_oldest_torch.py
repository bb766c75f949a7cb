"""The oldest PyTorch that rules run on. Imported first, this module refuses an older one."""

import torch
from torch.torch_version import TorchVersion

from gradsurgeon.errors import GradSurgeonError

OLDEST = "2.8"


def check(found: str) -> None:
    if TorchVersion(found) < OLDEST:
        raise GradSurgeonError(
            f"applying rules needs PyTorch {OLDEST} or newer, this is {found}: hooks of older releases "
            f"behave otherwise; pip install 'torch>={OLDEST}', or lint, plan and diff without it"
        )


check(torch.__version__)
