"""The oldest PyTorch that rules run on. Imported first, this module refuses an older one."""

import torch
from torch.torch_version import TorchVersion

from gradsurgeon.errors import GradSurgeonError

OLDEST = "2.8"


def check(version: str) -> None:
    if TorchVersion(version) < OLDEST:
        raise GradSurgeonError(
            f"applying rules needs PyTorch {OLDEST} or newer, this is {version}: hooks of older releases "
            f"behave otherwise; pip install 'torch>={OLDEST}', or lint, plan and diff without it"
        )


check(torch.__version__)
