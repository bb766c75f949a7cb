"""The action `noise`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import At, Edit
from gradsurgeon.actions._kinds import EditRule
from gradsurgeon.actions._ramps import NumberFrom0, fixed

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Noise(EditRule):
    """Add annealed Gaussian noise to a gradient.

    ## What it does
    Adds noise of the standard deviation `std / (1 + step)^(decay / 2)`, as Neelakantan et al. (2015, arXiv:1511.06807) do;
    `step` is the number of the update. The noise is drawn by `seed`, step and name alone: it is alike on all ranks and in a
    resumed run, the random state of the script stays as it is, and a shard gets its part of the noise of the whole.

    ## Why use it
    Noise helps very deep networks out of bad starts. To see how far rounding carries, use `perturb`.

    ## Points
    `step` only: each backward pass would add noise of its own.

    ## Cost
    One draw of the size of the whole tensor, and one addition; never waits for the device.
    """

    points: ClassVar = ("step",)
    targets: ClassVar = ("params",)
    EXAMPLES: ClassVar = (Example({"std": 0.0}, [1.0, -3.0], expect=[1.0, -3.0]),)

    action: Literal["noise"] = "noise"
    std: Annotated[
        NumberFrom0, Field(description="Standard deviation in the first update, or a ramp.")
    ]
    decay: Annotated[
        float, Field(ge=0, description="How fast the variance sinks: by `(1 + step)^decay`.")
    ] = 0.55
    seed: Annotated[int, Field(ge=0, lt=2**63, description="The seed of the noise.")] = 0

    @property
    def keeps_zero(self) -> bool:
        return False

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        generators: dict[torch.device, torch.Generator] = {}

        def draw(name: str, step: int, drawn: Tensor) -> Tensor:
            """Fill a tensor of the shape of a whole parameter."""
            device = drawn.device
            if device not in generators:
                generators[device] = torch.Generator(device)
            generator = generators[device].manual_seed(self._seed_of(name, step))
            std = fixed(self.std) / (1 + step) ** (self.decay / 2)
            return drawn.normal_(0.0, std, generator=generator)

        def apply(grad: Tensor, at: At) -> Tensor:
            shape = grad.shape if at.shard is None else at.shard.shape
            drawn = torch.empty(shape, dtype=torch.float32, device=grad.device)
            draw(at.name, at.step, drawn)
            if at.shard is not None:
                drawn = at.shard.part_of(drawn)
            return (grad + drawn).to(grad.dtype)

        def apply_(grads: Sequence[Tensor], names: Sequence[str], step: int) -> None:
            drawn = None
            for grad, name in zip(grads, names, strict=True):
                # To allocate memory takes longer than to draw a few numbers.
                if drawn is None or (drawn.shape, drawn.device) != (grad.shape, grad.device):
                    drawn = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
                # In the wider dtype, then rounded.
                grad.add_(draw(name, step, drawn))

        return Edit(apply, apply_)

    def _seed_of(self, name: str, step: int) -> int:
        key = hashlib.blake2b(f"{self.seed} {step} {name}".encode(), digest_size=7)
        return int.from_bytes(key.digest(), "big")
