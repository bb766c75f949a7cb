"""The action `perturb`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Edit
from gradsurgeon.actions._kinds import EditRule

if TYPE_CHECKING:
    from torch import Tensor


# An odd number, which spreads the bits of another number.
_ODD = 0x2545F4914F6CDD1D


class Perturb(EditRule):
    """Multiply a tensor by 1 plus a little noise, to see how far rounding alone carries.

    ## What it does
    Multiplies every element by `1 + eps * noise`, with independent noise of a normal distribution. The numbers come
    from a generator of its own, seeded with `seed`: the random state of the script stays as it is. Whole numbers stay,
    because masks, places and categories are made of them, and so does what is not finite. Equal tensors get equal noise, so
    a recomputed forward pass is that of the first time.

    ## Why use it
    Two runs that differ in rounding part, and later by much more than rounding. A run with a `perturb` of the size of
    rounding shows by how much: `gradsurgeon compare` takes such runs as `--noise`, and `gradsurgeon run --perturb EPS`
    makes one, with noise on the inputs and output gradients of all modules that own parameters.
    A module that writes into a tensor that it was given, such as a cache, writes into a copy: leave it out by `exclude`.

    ## Cost
    One draw and two passes over the tensor; never waits for the device.
    """

    EXAMPLES: ClassVar = (Example({"eps": 1e-6}, [0.0, 0.0], expect=[0.0, 0.0]),)

    action: Literal["perturb"] = "perturb"
    eps: Annotated[float, Field(gt=0, lt=1, description="The size of the noise, such as 1e-6.")]
    seed: Annotated[int, Field(ge=0, lt=2**63, description="The seed of the noise.")] = 0

    @property
    def may_overflow(self) -> bool:
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"adds noise of {self.eps:g} of each element: the run is for comparing, not for use",
        )

    def compile(self) -> Edit:
        import torch  # noqa: PLC0415 # reading rules must not need torch

        from gradsurgeon.tensors import _numbers  # noqa: PLC0415 # the same

        def noise(wide: Tensor) -> Tensor:
            # Drawn anew in each call, so that a recomputed forward pass gets the noise of the original.
            drawn = torch.empty(wide.numel(), dtype=torch.float32, device=wide.device)
            generator = torch.Generator(wide.device).manual_seed(self.seed)
            drawn.normal_(0.0, self.eps, generator=generator)
            # Tensors of one shape must not get one noise. Their sum is read on the device alone.
            bits = wide.sum(dtype=torch.float64).view(torch.int64)
            shift = bits.mul(_ODD).abs()
            places = torch.arange(wide.numel(), device=wide.device) + shift
            return drawn[places.remainder(max(1, wide.numel()))].view(wide.shape)

        def apply(tensor: Tensor) -> Tensor:
            wide = _numbers.in_float32(tensor)
            real = wide.detach()
            if wide.is_complex():
                real = real.real + real.imag
            # Masks, places and categories are whole numbers, and infinity times noise may be NaN.
            gets_noise = real.isfinite() & (real != real.round())
            factor = noise(real).to(real.dtype).where(gets_noise, 0.0)
            change = (wide * factor).where(factor != 0, 0.0)
            # In two steps: 1 + noise would lose the digits of little noise.
            return (wide + change).to(tensor.dtype)

        return Edit(apply)
