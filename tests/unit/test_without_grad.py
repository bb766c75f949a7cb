"""Functions that run without gradients leave the mode of the thread as it was."""

import pytest
import torch

from gradsurgeon.tensors import _torch


@_torch.without_grad
def _doubled(tensor: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
    assert not torch.is_grad_enabled()
    if fails:
        raise ArithmeticError
    return tensor * 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_mode_is_as_it_was(enabled: bool) -> None:
    param = torch.ones(3, requires_grad=True)
    with torch.set_grad_enabled(enabled):
        assert not _doubled(param).requires_grad
        assert torch.is_grad_enabled() is enabled
        with pytest.raises(ArithmeticError):
            _doubled(param, fails=True)
        assert torch.is_grad_enabled() is enabled
