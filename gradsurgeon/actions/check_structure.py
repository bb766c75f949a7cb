"""The action `check-structure`."""

from typing import Literal

from gradsurgeon.actions._effects import Examination
from gradsurgeon.actions._kinds import CheckRule


class CheckStructure(CheckRule):
    """Find tied weights that have come apart, and units of a layer that are copies of one another.

    ## What it finds
    An embedding and another weight that are two tensors and equal in every bit: they were tied once, and a copy or a
    checkpoint has parted them. Layers all of whose units are equal and get equal gradients, as after an
    initialisation with a constant: they stay equal, so the layer learns as one unit.

    ## What stays quiet
    A tied weight that is one tensor; a copy in a model whose `config.tie_word_embeddings` is False; layers that were
    copied from one another; tables of one constant; a head that starts at 0, whose units get different gradients.

    ## Cost
    One comparison of a few elements per weight at the first update. Equal weights are compared whole.
    """

    action: Literal["check-structure"] = "check-structure"

    def compile(self) -> Examination:
        from gradsurgeon.actions.checks.structure_check import StructureCheck  # noqa: PLC0415 # it needs torch

        return Examination(StructureCheck(), self.then)
