"""The hooks on parameters: all are installed or none. A post-accumulate hook must reach no parameter, even by the session."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsurgeon.errors import BindError, GradSurgeonError, printable
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.effect import Effect
from gradsurgeon.runtime.effects import Effects, by_parameter
from gradsurgeon.runtime.gradients import check_layout
from gradsurgeon.runtime.origin import Origin
from gradsurgeon.runtime.refusals import Hook
from gradsurgeon.tensors import _dist, _numbers, _torch


class ArrivalHook(Hook):
    """Post-accumulate hook on several ranks: notes this rank's contribution before an average, and the order of arrival."""

    def __init__(self, watch: BackwardWatch, index: int, *, is_trapped: bool) -> None:
        super().__init__(watch)
        self._index = index
        self._is_trapped = is_trapped

    def run(self, watch: BackwardWatch, param: Tensor) -> None:
        # During a pause also: other ranks may wait for a paused rank.
        watch.seen.order.append(self._index)
        if not self._is_trapped or param.grad is None or _dist.is_sharded(param):
            return
        if watch.context.ranks.is_reducing:
            watch.seen.contributed[self._index] = _numbers.norms([param.grad])[0]


class TensorHook(Hook):
    """Tensor hook: the rules at `backward` on one parameter, in file order."""

    def __init__(self, watch: BackwardWatch, index: int, effects: Sequence[Effect]) -> None:
        super().__init__(watch)
        self._index = index
        self._effects = effects

    def run(self, watch: BackwardWatch, grad: Tensor | None) -> Tensor | None:
        # A custom autograd function may return None for an input.
        if grad is None:
            return None
        index = self._index
        context = watch.context
        watch.seen.calls[index] += 1
        param = context.parameters.param(index)
        counter = context.counters[index]
        due = [effect for effect in self._effects if context.is_due(effect.rule, counter)]
        if param is None or not due:
            return None
        if not watch.accumulation.runs(param):
            text = "torch.autograd.grad() is not training: its results are left alone"
            context.event_log.notice_once("autograd.grad", text, step=counter.step)
            return None
        context.refuse_graph_capture()
        origin = Origin(
            context.names[index],
            counter.step,
            lambda: counter,
            scale=context.scaling.scale,
            index=index,
            logged=watch.seen.logged,
        )
        out = grad
        for effect in due:
            out = _edited(effect, out, origin) if effect.edits else effect.on_tensor(out, origin)
        if out is grad or not context.acts:
            return None
        return out


def _edited(effect: Effect, grad: Tensor, origin: Origin) -> Tensor:
    """Edit the part of a gradient that this rank holds."""
    rule = effect.rule
    check_layout(rule, grad, origin.name)
    if _dist.is_partial(grad) and not rule.linear:
        raise GradSurgeonError(
            f"rule {rule.id}: {origin.name} gets an addend that awaits a sum over ranks, so a bound on it bounds nothing; "
            "use `at: step`"
        )
    part = _dist.local(grad)
    out = effect.on_tensor(part, origin)
    if out is part:
        return grad
    if _dist.is_sharded(grad):
        return _dist.like(out, grad)
    return out


class ParamHooks:
    def __init__(self, context: Context, watch: BackwardWatch, effects: Effects) -> None:
        self._context = context
        self._watch = watch
        self._effects = by_parameter(effects.on_params("backward"))
        self._trapped = by_parameter(effects.judging)
        self._armed = effects.watched
        self._handles: dict[int, list[RemovableHandle]] = {}

    def arm(self) -> None:
        for index in self._armed:
            # Another thread may be in a backward pass: it must not meet a parameter whose hooks are off for a moment.
            if not self._is_armed(index):
                self.rearm(index)

    def _is_armed(self, index: int) -> bool:
        """Return whether the parameter now under the name has its hooks, all of them."""
        param = self._context.parameters.param(index)
        if param is None:
            return False
        handles = self._handles.get(index, [])
        wanted = 0
        if index in self._effects:
            wanted += 1
        if _dist.world() > 1:
            wanted += 1
        if len(handles) != wanted:
            return False
        return all(_torch.is_hook_of(param, handle) for handle in handles)

    def rearm(self, index: int) -> bool:
        """Put the hooks on the parameter now under the name; return whether there is a parameter."""
        for handle in self._handles.pop(index, []):
            handle.remove()
        param = self._context.parameters.param(index)
        if param is not None:
            # Hooks are listed one by one, so they can be removed if a later one raises.
            for handle in self._put(index, param):
                self._handles.setdefault(index, []).append(handle)
        return param is not None

    def taken_off(self) -> list[int]:
        """Return the parameters with a hook that other code removed."""
        taken_off = []
        for index, handles in self._handles.items():
            for handle in handles:
                hooks = handle.hooks_dict_ref()
                if hooks is None or handle.id not in hooks:
                    taken_off.append(index)
                    break
        return taken_off

    def revive(self, index: int) -> bool:
        """Reinstall hooks on a parameter whose content was swapped; return whether the parameter has hooks."""
        param = self._context.parameters.param(index)
        if param is None or not self._handles.get(index):
            return False
        _torch.reinstall_hooks(param)
        return True

    def disarm(self) -> None:
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        for param in self._context.parameters.params(self._armed):
            if param is not None:
                _torch.forget_empty_hooks(param)

    def _put(self, index: int, param: Tensor) -> Iterator[RemovableHandle]:
        can_have_grad = param.is_floating_point() or param.is_complex()
        if param.is_inference() or not can_have_grad:
            return  # Integers and inference tensors never have a gradient.
        if not param.is_leaf:
            name = printable(self._context.names[index])
            raise BindError([f"{name} is not a leaf of the graph: it never gets a gradient"])
        needs_grad = param.requires_grad
        try:
            effects = self._effects.get(index, ())
            if effects:
                # torch refuses hooks on frozen parameters but keeps existing hooks, so a
                # rule acts as soon as the parameter is unfrozen.
                param.requires_grad_(True)
                yield _torch.register_hook(param, TensorHook(self._watch, index, effects))
            if _dist.world() > 1:
                param.requires_grad_(True)
                hook = ArrivalHook(self._watch, index, is_trapped=index in self._trapped)
                yield _torch.register_post_accumulate_hook(param, hook)
        finally:
            if not needs_grad:
                param.requires_grad_(False)
