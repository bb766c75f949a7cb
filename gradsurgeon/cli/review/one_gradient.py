"""One gradient through one rule, as a training hands it to an optimizer. Needs torch."""

import logging
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import SGD

from gradsurgeon import api
from gradsurgeon.actions import Rule, Steps, Where
from gradsurgeon.errors import GradSurgeonError

_TOLERANCE = 1e-6
# A test asks what the rule does, not where and when.
_PLAIN = {
    "params": ("weight",),
    "exclude": (),
    "where": Where(),
    "steps": Steps(),
    "expect": None,
    "model": None,
    "optional": False,
}


def failure(rule: Rule, gradient: Sequence[float], expect: Sequence[float]) -> str:
    """Return why an optimizer does not get what is expected of a gradient, empty if it does. A hidden one counts as zeros."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(len(gradient)))
    optimizer = SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A trap that does what the test says is no news.
        logging.disable()
        try:
            with api.apply(model, [rule.model_copy(update=_PLAIN)]):
                torch.autograd.backward((model.weight * torch.tensor(gradient)).sum())
                optimizer.step()
        except GradSurgeonError as error:
            return str(error).partition("\n")[0]
        finally:
            logging.disable(logging.NOTSET)
    # The optimizer has subtracted what it got.
    values = model.weight.detach().neg().double()
    wanted = torch.tensor(expect, dtype=torch.float64)
    if torch.allclose(values, wanted, rtol=_TOLERANCE, atol=0.0, equal_nan=True):
        return ""
    shown = [float(f"{number:.7g}") for number in values.tolist()]
    return f"the optimizer gets {shown}, not {list(expect)}"
