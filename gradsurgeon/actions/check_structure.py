"""The action `check-structure`."""

from typing import Literal

from gradsurgeon.actions._effects import Examination
from gradsurgeon.actions._kinds import CheckRule


class CheckStructure(CheckRule):
    """Find tied weights that have come apart, units of a layer that are copies of one another, and losses that do not fit.

    ## What it finds
    An embedding and another weight that are two tensors and equal in every bit: they were tied once, and a copy or a
    checkpoint has parted them. Layers all of whose units are equal and get equal gradients, as after an
    initialisation with a constant: they stay equal, so the layer learns as one unit. In the graphs of the first three
    passes: a sigmoid whose result goes into `binary_cross_entropy_with_logits`, a softmax whose result goes into another
    one or into `nll_loss`, a softmax over one element, and a prediction that was broadcast against its target, by `mse_loss`
    or in a mean of squares that the script writes out.

    Settings that do nothing: `requires_grad` as an attribute of a module, or a misspelt attribute of a parameter, that says
    the opposite of what its parameters do. Under `gradsurgeon run` also a `load_state_dict` before the first update of which
    no name matched, and later one that copied a module onto itself; before the first update that copy is a fact.

    Facts, which stand below the findings of a run and may be meant: a module with parameters that a list has several
    times; a target, teacher or moving average that is the network itself; a table of random numbers that is an attribute of
    a module, is used in the loss, and is neither a parameter nor a buffer; three linear layers in a row without an
    operation between them; linear layers in float32 where most compute in half precision; three passes alike that add up
    their gradients, with losses that no number divides; data so large that it saturates a sigmoid or tanh of the first
    layer.

    ## What stays quiet
    A tied weight that is one tensor; a copy in a model whose `config.tie_word_embeddings` is False; layers that were
    copied from one another; tables of one constant; a head that starts at 0, whose units get different gradients.
    Attention to a single token or neighbour; one head of a single choice beside others; a loss that compares all pairs itself.
    An attribute that the class of a module sets itself; a load after or before which another one into the module matches;
    a loop that gives all modules of a population the weights of one; distributed checkpoints.

    ## Cost
    One comparison of a few elements per weight at the first update. Equal weights are compared whole. A walk through
    the last 256 operations of the graph in three passes.
    """

    action: Literal["check-structure"] = "check-structure"

    def compile(self) -> Examination:
        from gradsurgeon.actions.checks.structure_check import StructureCheck  # noqa: PLC0415 # it needs torch

        return Examination(StructureCheck(), self.then)
