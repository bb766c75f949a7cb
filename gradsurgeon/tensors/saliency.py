"""Grad-CAM as numbers. Works on tensors of torch without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_IMAGES = 4


def grad_cam(maps: Tensor, gradients: Tensor) -> Tensor:
    """Return where a convolution found evidence for a score: Grad-CAM (Selvaraju et al., ICCV 2017).

    The gradient of each channel, averaged over its area, weights the channel. Negative values in the sum over the
    channels are evidence for something else, and become 0. For the map of a class, call `backward` on its score
    before the softmax: the gradient of a loss shows evidence for a larger loss.

    Args:
        maps: the output of the module, of shape (N, C, H, W).
        gradients: the gradient of this output, of the same shape.

    Returns:
        One map per sample, of shape (N, H, W), 0 or more, as float64 on the CPU. The unit is arbitrary: only
        proportions matter.

    Raises:
        ValueError: the tensors are not feature maps and their gradients.
    """
    if maps.dim() != _IMAGES or maps.shape != gradients.shape:
        raise ValueError(
            "Grad-CAM takes feature maps of shape (N, C, H, W) and their gradients, found "
            f"{list(maps.shape)} and {list(gradients.shape)}"
        )
    maps = maps.detach().cpu().double()
    gradients = gradients.detach().cpu().double()
    weights = gradients.mean(dim=(2, 3), keepdim=True)
    return (weights * maps).sum(dim=1).clamp(min=0)
