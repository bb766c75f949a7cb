"""Finds gradients that still carry the scale of a `GradScaler` when the script clips them, or when the optimizer uses them."""

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Finding, Findings, Pass, Update
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck, Streak
from gradsurgeon.tensors.sampling import sizes_of

_IN_A_ROW = 3
_ALIKE = 1e-3
_APART = 1e-2
# A clip that takes the scale into account has a bound near this times a usual one.
_LEAST_BOUND = 1e-2

_CLIPPED = (
    "the script clips gradients to {what} of {norm:.3g} while they still carry the loss scale of {scale:.6g}, so the "
    "true bound is {bound:.1e}. Call `scaler.unscale_(optimizer)` before `clip_grad_norm_`"
)
_BARE = (
    "the gradients of the update of step {step} still carry the loss scale of {scale:.6g}, for the third time "
    "in a row: `optimizer.step()` does not divide by it. Call `scaler.step(optimizer)`"
)


class LossScale(OptimizerCheck):
    """Looks for gradients that still carry the loss scale when the script clips or uses them."""

    def __init__(self) -> None:
        # Whether an update has found gradients that carry a scale. Only then the sizes of later ones are asked for.
        self._wants_sizes = False
        # The norm and the largest element of the gradients after the last pass; then of such passes, and right before unscaling.
        self._after_pass: tuple[float, ...] = ()
        self._clips: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
        # The scale on the gradients of the last pass.
        self._scale: Tensor | None = None
        # Whether a `GradScaler` or the script divides by the scale.
        self._is_unscaled = False
        self._bare = Streak(_IN_A_ROW)

    def after_pass(self, done: Pass) -> Findings:
        if done.reaches(self.owner.indices):
            self._scale = done.scale
            if self._wants_sizes:
                self._after_pass = sizes_of(done.grads, self.owner.indices)
        return ()

    def before_unscaling(self, update: Update) -> Findings:
        """Yield a finding if gradients that still carry the loss scale always come to the same, smaller size."""
        if update.scale is None or len(self._clips) == _IN_A_ROW:
            return
        self._wants_sizes = True
        now = sizes_of(update.grads, self.owner.indices)
        if self._after_pass and now:
            self._clips.append((self._after_pass, now))
        if len(self._clips) < _IN_A_ROW:
            return
        self._wants_sizes = False
        sizes = torch.tensor(self._clips)
        for place, what in enumerate(("a norm", "elements")):
            whole, clipped = sizes[:, :, place].T
            norm = float(clipped[0])
            bound = norm / update.scale
            if bound < _LEAST_BOUND and _is_clip(whole, clipped):
                text = _CLIPPED.format(what=what, norm=norm, scale=update.scale, bound=bound)
                yield Finding("clipped", text)
                return

    def before_update(self, update: Update) -> Findings:
        """Yield a finding if updates without a `GradScaler` use gradients as a scaled pass has left them, again and again."""
        self._is_unscaled |= update.by_scaler
        if self._scale is None or self._is_unscaled:
            return
        if self._wants_sizes:
            sizes = sizes_of(update.grads, self.owner.indices)
            self._is_unscaled = not sizes or sizes != self._after_pass
            if self._bare.reaches(not self._is_unscaled) and float(self._scale) > 1:
                text = _BARE.format(step=update.step, scale=float(self._scale))
                yield Finding("scaled", text)
        self._wants_sizes = not self._is_unscaled and self._bare.count < _IN_A_ROW

    def after_update(self, update: Update) -> Findings:  # noqa: ARG002 # the next pass begins anew
        self._after_pass = ()
        self._scale = None
        return ()


def _is_clip(whole: Tensor, clipped: Tensor) -> bool:
    """Tell whether different sizes were brought to one size. A division by a constant gives one ratio."""
    are_reduced = (clipped > 0) & (clipped < whole / 2)
    if not bool(are_reduced.all()):
        return False
    return _spread(clipped) < _ALIKE and _spread(clipped / whole) > _APART


def _spread(values: Tensor) -> float:
    return float((values.max() - values.min()) / values.max())
