"""Finds losses whose operations do not fit together: a sigmoid too many, a softmax of one number, shapes that broadcast."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsurgeon.actions.checks.base import Check, Finding, Findings, LossSource, Pass, Update
from gradsurgeon.actions.checks.models_of_passes import is_elsewhere
from gradsurgeon.tensors.backward_graph import NO_GRAPH, READS_SAVED, LossNode

# The graph of a loss is looked at in so many passes, and of each so many of the last operations.
PASSES = 3
_MOST_NODES = 256
_SOFTMAX = ("SoftmaxBackward0", "LogSoftmaxBackward0")
# These change no number.
_SHAPES = (
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "CloneBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
)
# These pass weights on to what they weigh.
_PASSED_ON = (*_SHAPES, "Expand", "NativeDropout", "Mul")
_PRODUCTS = ("BmmBackward0", "MmBackward0", "BaddbmmBackward0")
_DIFFERENCES = {
    "MseLossBackward0": "mse_loss",
    "SmoothL1LossBackward0": "smooth_l1_loss",
    "HuberLossBackward0": "huber_loss",
}
# The nodes that tell passes alike: another pass may lack a node of its inputs.
_LAST = 3
_SCALED = (["DivBackward0"], ["MulBackward0"])
_LINEAR = "AddmmBackward0"
# Two layers in a row may be a factorization, such as a bottleneck.
_LEAST_IN_A_ROW = 3
_HALF = ("bfloat16", "float16")
# The input of each layer, by the name under which its node keeps it, and its place among the arguments.
_INPUTS = {_LINEAR: ("mat1", 1), "MmBackward0": ("self", 0), "ConvolutionBackward0": ("input", 0)}
_BOUNDED = {"TanhBackward0": "tanh", "SigmoidBackward0": "sigmoid"}
# Normalised data has smaller magnitudes on average.
_LARGE = 10
# So near to a bound hardly any gradient passes.
_NEAR_BOUND = 1e-3
_HALF_OF_ALL = 0.5

_TWO_SIGMOIDS = (
    "`binary_cross_entropy_with_logits` is given the result of a sigmoid, and applies another one: no output goes beyond "
    "0.73, and gradients are small. Pass the logits"
)
_NOT_CONFIDENT = "it cannot become confident, and gradients are small"
_OF_A_SOFTMAX = f"`nll_loss` is given the result of a softmax, not of a log_softmax: {_NOT_CONFIDENT}. Pass the result of `log_softmax`"
# Maps an operation to another one that must not make its input, and to the reason.
_TWICE = {
    "BinaryCrossEntropyWithLogitsBackward0": ("SigmoidBackward0", _TWO_SIGMOIDS),
    "LogSoftmaxBackward0": (
        _SOFTMAX[0],
        f"`cross_entropy` or `log_softmax` is given the result of a softmax, and applies another: {_NOT_CONFIDENT}. Pass the logits",
    ),
    "NllLossBackward0": (_SOFTMAX[0], _OF_A_SOFTMAX),
    "NllLoss2DBackward0": (_SOFTMAX[0], _OF_A_SOFTMAX),
}
OF_SIZE_1 = "a dimension of size 1"
_ONE_CHOICE = (
    f"a {{operation}} runs over {OF_SIZE_1} "
    "(shape {shape}, dim {dim}): its result is always {result}, and no gradient "
    "passes. Use a sigmoid for two classes, or the dimension of the choices"
)
_BROADCAST = (
    "`{loss}` compares a prediction of shape {prediction} with a target of another shape: both were broadcast to {whole}, so "
    "each prediction is compared with each target. Give both one shape"
)
_PAIRS = (
    "a prediction of {size} elements was subtracted from a target of another shape, or a target from it: the difference was "
    "broadcast to {whole}, so each prediction is compared with each target. Give both one shape"
)
_SQUARE = 2
_MEANS = {"MeanBackward0", "SumBackward0"}
# An energy distance also compares the predictions with one another.
_PAIRS_ITSELF = {"TBackward0", "PermuteBackward0", "TransposeBackward0", "UnsqueezeBackward0"}
_SUBTRACTIONS = ("SubBackward0", "RsubBackward0")
# Differences of float32 are rounded.
_ROUNDING = 1e-4


_IN_A_ROW = (
    "{count} linear layers ({widths}) follow one another without an operation between them: together they compute one "
    "linear map. Put an activation between them"
)
_SUM_OF_PASSES = (
    f"{PASSES} backward passes in a row added to the same gradients, and their losses are not divided by a number: the update "
    "gets the sum of the passes. If it should get their mean, divide each loss by the number of passes"
)
_DTYPES = (
    "linear layers compute in {other}, but {count} of {all} in float32: `torch.autocast` is off there, or the script "
    "converts the weights"
)
_OUT_OF_RANGE = (
    "the data that goes into a layer with a {activation} has a mean magnitude of {size:.3g}, so {share:.0%} of the results are "
    "saturated: no gradient passes there. Normalise the input to a range of about -1 to 1"
)
_UNREAD = "the operations of losses were not checked: torch before 2.10 does not show what they have saved"


class _Operation:
    """A node of a loss, with those that made its arguments, and those that use its result; older ones are left out."""

    def __init__(self, node: LossNode, nodes: Sequence["_Operation"]) -> None:
        self.name = node.name
        self.saved = node.saved
        self.made_of = node.made_of
        self.sources: list[_Operation | None] = []
        self.users: list[_Operation] = []
        for place in node.made_of:
            source = None
            if place >= 0:
                source = nodes[place]
                source.users.append(self)
            self.sources.append(source)

    def maker(self, number: int = 0) -> "_Operation | None":
        """Return the node that made an argument, past those that only change the shape."""
        source = self.sources[number]
        if source and source.name in _SHAPES:
            return source.maker()
        return source

    @property
    def names_of_users(self) -> set[str]:
        return {user.name for user in self.users}

    @property
    def downstream(self) -> set["_Operation"]:
        """The nodes that use the result, at first or second hand."""
        downstream = set[_Operation]()
        pending = [self]
        while pending:
            new = set(pending.pop().users) - downstream
            downstream |= new
            pending += new
        return downstream

    @property
    def pairs(self) -> int:
        """The number of rows of the first argument if it is a square matrix, else 0."""
        whole = self.saved.get("self")
        if not isinstance(whole, Tensor) or not whole.dim() or whole.shape != (len(whole),) * 2:
            return 0
        return len(whole)

    @property
    def choices(self) -> int:
        """The size of the dimension over which a softmax runs, 0 if it is not known, or if this is none."""
        result = self.saved.get("result")
        if self.name not in _SOFTMAX or not isinstance(result, Tensor) or not result.dim():
            return 0
        return int(result.shape[self.dim])

    @property
    def dim(self) -> int:
        """The dimension of a softmax, which its node keeps without a sign."""
        dim = int(self.saved["dim"])
        if dim >= 2**63:
            dim -= 2**64
        return dim % int(self.saved["result"].dim())

    @property
    def is_attention(self) -> bool:
        """Whether the result of a softmax weighs values: in a product of matrices, or in a sum."""
        # Logarithms of probabilities weigh nothing: their sum with labels is a loss.
        return self._weighs(may_sum=self.name == _SOFTMAX[0])

    def _weighs(self, *, may_sum: bool) -> bool:
        for user in self.users:
            is_sum = user.name == "MulBackward0" and "SumBackward1" in user.names_of_users
            if user.name in _PRODUCTS or (may_sum and is_sum):
                return True
            if user.name.startswith(_PASSED_ON) and user._weighs(may_sum=may_sum):  # noqa: SLF001 # of this class
                return True
        return False


class LossGraph(Check):
    """Looks at the graphs of the first passes."""

    def __init__(self) -> None:
        self._passes = 0
        # The updates that the passes feed, with the names of their nodes.
        self._graphs: set[tuple[int | str, ...]] = set()
        # The passes in which a softmax ran over one number: a batch may be of one element by chance.
        self._with_one_choice = 0
        # Whether the next update gets a sum of passes, unless the script clears the gradients.
        self._is_sum = False

    @property
    def is_over(self) -> bool:
        return self._passes == PASSES and not self._is_sum

    def before_pass(self, starting: Pass) -> Findings:
        self._is_sum = self._is_sum and starting.is_any(starting.members)
        if self._passes == PASSES or starting.graph is None:
            return
        self._passes += 1
        if not READS_SAVED:
            yield Finding("unread", _UNREAD, is_fact=True)
        loss = starting.graph.last_nodes(_MOST_NODES)
        for finding in self._findings(loss):
            if not is_elsewhere(finding.text, starting):
                yield finding
        # Passes alike, without a factor at the end of their losses.
        names = [node.name for node in loss]
        self._graphs.add((starting.step, *names[-_LAST:]))
        are_alike = self._passes == PASSES and len(self._graphs) == 1
        self._is_sum = are_alike and starting.is_any(starting.members) and names[-1:] not in _SCALED

    def _findings(self, loss: Sequence[LossNode]) -> Findings:
        nodes: list[_Operation] = []
        for node in loss:
            nodes.append(_Operation(node, nodes))
        try:
            yield from self._findings_in(nodes, loss)
        finally:
            # Operations refer to one another, and would keep weights until the cycle collector runs.
            for operation in nodes:
                operation.users.clear()

    def _findings_in(self, nodes: Sequence[_Operation], loss: Sequence[LossNode]) -> Findings:
        for place, node in enumerate(nodes):
            for look in (_twice, _broadcast, _distances):
                text = look(node)
                if text:
                    yield Finding(look.__name__, text, source=LossSource(loss, place))
        for place, node in enumerate(nodes):
            text = _one_choice(node, nodes)
            if text:
                self._with_one_choice += 1
                if self._with_one_choice == PASSES:
                    yield Finding("one choice", text, source=LossSource(loss, place))
                break
        for fact in (_in_a_row(nodes), _dtypes(loss)):
            if fact:
                yield Finding(fact, fact, is_fact=True)
        text = _out_of_range(nodes)
        if text:
            yield Finding("range", text, is_fact=True)

    def before_update(self, update: Update) -> Findings:
        if self._is_sum and update.is_any(update.members):
            yield Finding("sum", _SUM_OF_PASSES, is_fact=True)
        self._is_sum = False


def _twice(node: _Operation) -> str:
    unwanted, text = _TWICE.get(node.name, ("", ""))
    maker = node.maker() if unwanted else None
    return text if maker and maker.name == unwanted and maker.choices != 1 else ""


def _one_choice(node: _Operation, nodes: Sequence[_Operation]) -> str:
    if node.choices != 1 or node.is_attention:
        return ""
    # Logarithms that are added to others of the model, as the weights of a mixture are.
    for user in node.users:
        if user.name == "AddBackward0" and None not in user.sources[:2] and len(user.sources) > 1:
            return ""
    # With another head of several choices one of a single choice may be meant.
    downstream = node.downstream
    for other in nodes:
        is_on_one_path = other in downstream or node in other.downstream
        if other.choices > 1 and not other.is_attention and not is_on_one_path:
            return ""
    operation, number = "softmax", "1"
    if node.name.startswith("Log"):
        operation, number = "log_softmax", "0"
    shape = list(node.saved["result"].shape)
    return _ONE_CHOICE.format(operation=operation, shape=shape, dim=node.dim, result=number)


def _broadcast(node: _Operation) -> str:
    loss = _DIFFERENCES.get(node.name)
    size = node.pairs
    if loss is None or size <= 1 or not node.saved.get("reduction", 0):
        return ""
    expand, *targets = node.sources
    target = node.saved.get("target")
    if expand is None or expand.name != "ExpandBackward0" or any(targets):
        return ""
    # A script that adds a dimension itself means all pairs.
    maker = expand.sources[0]
    if maker is not None and maker.name == "UnsqueezeBackward0":
        return ""
    # If the target is a matrix, the script means that shape.
    is_matrix = not isinstance(target, Tensor) or 0 not in target.stride()
    prediction = tuple(expand.saved.get("self_sym_sizes", ()))
    if is_matrix or prediction not in ((size, 1), (size,)):
        return ""
    return _BROADCAST.format(loss=loss, prediction=list(prediction), whole=[size, size])


def _distances(node: _Operation) -> str:
    """Find the mean of squares or magnitudes that a script writes out, of a prediction and a target that were broadcast."""
    is_square = node.name == "PowBackward0" and node.saved.get("exponent") == _SQUARE
    size = node.pairs
    if not (is_square or node.name == "AbsBackward0") or size <= 1:
        return ""
    (difference,) = node.sources
    is_reduced = bool(node.users) and node.names_of_users <= _MEANS
    if not is_reduced or difference is None or difference.name not in _SUBTRACTIONS:
        return ""
    # One side is data.
    trained = [source for source in difference.sources if source is not None]
    if NO_GRAPH not in difference.made_of or not trained:
        return ""
    prediction = trained[0]
    # `l1_loss` expands both sides.
    if prediction.name == "ExpandBackward0" and prediction.sources[0] is not None:
        prediction = prediction.sources[0]
    # A script that adds a dimension itself means all pairs, and so does one that turns the prediction around elsewhere.
    is_paired = prediction.name == "UnsqueezeBackward0" or prediction.names_of_users & _PAIRS_ITSELF
    if is_paired or not _is_of_size(prediction, size):
        return ""
    # A target that is a matrix has other differences in each row.
    rows = node.saved["self"].detach().float()
    by_row = (rows[:1] - rows[:1, :1]).expand_as(rows)
    if not torch.allclose(rows - rows[:, :1], by_row, rtol=_ROUNDING, atol=_ROUNDING):
        return ""
    return _PAIRS.format(size=size, whole=[size, size])


def _is_of_size(node: _Operation, size: int) -> bool:
    """Tell whether a result has so many elements, as far as its node shows; a product of matrices has a row for each."""
    saved = node.saved
    if "mat2_sym_sizes" in saved:
        return bool(saved["mat2_sym_sizes"][-1] == 1)
    result = saved.get("result")
    if isinstance(result, Tensor):
        return result.numel() == size
    return node.name in _SHAPES and math.prod(saved.get("self_sym_sizes", (0,))) == size


def _in_a_row(nodes: Sequence[_Operation]) -> str:
    """Tell of linear layers without anything between them."""
    for last in reversed(nodes):
        widths: list[int] = []
        node: _Operation | None = last
        while node is not None and node.name == _LINEAR:
            before, after = node.saved["mat2_sym_sizes"]
            if not widths:
                widths.append(after)
            widths.insert(0, before)
            node = node.maker(1)
        if len(widths) > _LEAST_IN_A_ROW:
            return _IN_A_ROW.format(count=len(widths) - 1, widths=" to ".join(map(str, widths)))
    return ""


def _dtypes(loss: Sequence[LossNode]) -> str:
    """Tell of linear layers that compute in float32 although most compute in half the bits."""
    dtypes = []
    for node in loss:
        value = node.saved.get("mat1")
        if node.name == _LINEAR and isinstance(value, Tensor):
            dtypes.append(str(value.dtype).removeprefix("torch."))
    whole = dtypes.count("float32")
    half = [dtype for dtype in dtypes if dtype in _HALF]
    if not whole or whole >= len(half):
        return ""
    return _DTYPES.format(count=whole, all=len(dtypes), other=half[0])


def _out_of_range(nodes: Sequence[_Operation]) -> str:
    """Tell of data so large that the activation of the first layer is saturated. Waits for the device."""
    for node in nodes:
        layer = node.maker() if node.name in _BOUNDED else None
        if layer is None or layer.name not in _INPUTS:
            continue
        name, place = _INPUTS[layer.name]
        data = layer.saved.get(name)
        result = node.saved.get("result")
        if layer.made_of[place] != NO_GRAPH or data is None or result is None:
            continue
        values = result.detach().float().abs()
        is_saturated = 1 - values < _NEAR_BOUND
        if node.name == "SigmoidBackward0":
            is_saturated |= values < _NEAR_BOUND
        means = data.detach().float().abs().mean(), is_saturated.float().mean()
        size, share = torch.stack(means).tolist()
        if size > _LARGE and share > _HALF_OF_ALL:
            return _OUT_OF_RANGE.format(activation=_BOUNDED[node.name], size=size, share=share)
    return ""
