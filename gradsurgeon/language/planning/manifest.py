"""The names a rule can match: the parameters of a model, read without touching it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, FailFast, Field, StrictBool, StrictInt

from gradsurgeon.common import _live
from gradsurgeon.common._grouping import grouped, names_of

# Wrappers put one segment between their own name and the name of the wrapped module. The segment is
# dropped only if its owner is such a wrapper: a model may call a child `module`. Names identify the
# wrappers and their subclasses, so planning needs no torch.
_WRAPPERS = {
    "DistributedDataParallel": {"module"},
    "DataParallel": {"module"},
    "FullyShardedDataParallel": {"_fsdp_wrapped_module"},
    "OptimizedModule": {"_orig_mod"},
    "ActivationWrapper": {"_checkpoint_wrapped_module"},
    "DeepSpeedEngine": {"module"},
    # Fabric holds the wrapped module twice, with and without the wrapper of its strategy.
    "_FabricModule": {"_forward_module", "_original_module"},
}
_THEIR_PACKAGES = {"torch", "lightning", "lightning_fabric", "deepspeed"}
# Wrappers that hold nothing of their own, and may be exchanged.
_EXCHANGEABLE = {"DistributedDataParallel", "DeepSpeedEngine"}
ENGINE_NOTE = (
    "DeepSpeed averages gradients: `accumulated` and `step` are the average right before its update, from ZeRO 1 on and in half "
    "precision before its clipping; in ZeRO 0 with float32 `step` is after it"
)

Sharding = Literal["", "fully_shard", "FullyShardedDataParallel", "tensor parallel"]

# Limits for files, not for models. On longer names a regular expression could take long.
Name = Annotated[str, Field(min_length=1, max_length=300)]
NameList = Annotated[tuple[Name, ...], FailFast()]
Size = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]
Shape = Annotated[tuple[Size, ...], Field(max_length=64)]


@dataclass(frozen=True, slots=True)
class Param:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Name  # canonical, the first one in the order of ``named_parameters``
    aliases: NameList  # its other canonical names, if the tensor is tied
    shape: Shape | None  # none while a lazy module has not seen its first input
    dtype: Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,40}$")]
    requires_grad: StrictBool
    module_type: NameList  # class names of the owners, most derived first, base classes included
    sparse: StrictBool = False  # the owner asks for sparse gradients
    sharding: Sharding = ""

    @property
    def numel(self) -> int:
        if self.shape is None:
            return 0
        return prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


ROOT = "."


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Name
    aliases: Annotated[NameList, Field(default=())]
    module_type: Annotated[NameList, Field(alias="type")]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """The place of a parameter: ``owner._parameters[key]``, under a canonical name."""

    name: str
    owner: Any
    key: str


@dataclass(frozen=True)
class Manifest:
    """All parameters and modules of a model, in the order of ``named_parameters``.

    Names from a file of weights have no class names (``module_type`` is empty).

    Attributes:
        origin: class name of the root, or the file of weights.
        params: the parameters.
        modules: the modules, the root first.
        model_type: class names of the root, most derived first, for `model:` in a rule.
        notes: facts about the names that a reader of a plan must know.
    """

    origin: str
    params: tuple[Param, ...]
    modules: tuple[ModuleEntry, ...] = ()
    model_type: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements over all parameters."""
        return sum(param.numel for param in self.params)

    # Each rule asks for these facts about all names, and there may be thousands of both.

    @cached_property
    def flat_params(self) -> tuple[Param, ...]:
        """The parameters that FullyShardedDataParallel keeps flat."""
        return tuple(param for param in self.params if param.sharding == "FullyShardedDataParallel")

    @cached_property
    def lacks_classes(self) -> bool:
        """Whether the source of the names lacks classes, as a file of weights does."""
        things: tuple[Param | ModuleEntry, ...] = (*self.params, *self.modules)
        return not all(thing.module_type for thing in things)


def is_scripted(kind: Collection[str]) -> bool:
    """Tell whether `torch.jit` runs no hook of modules of a class."""
    return "ScriptModule" in kind and "TopLevelTracedModule" not in kind


def class_names(module: object) -> tuple[str, ...]:
    return _names_of(type(module))  # type: ignore[arg-type] # a class has the hash of a class


@lru_cache(maxsize=256)
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple([base.__name__ for base in kind.__mro__[:-1]])


@lru_cache(maxsize=256)
def _transparent(kind: type) -> frozenset[str]:
    """Return the names of children that a wrapper only wraps."""
    segments: set[str] = set()
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in _THEIR_PACKAGES:
            segments |= _WRAPPERS.get(base.__name__, set())
    return frozenset(segments)


def walk(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a module and all modules inside it with their canonical paths; the path of the root is empty."""
    yield path, module
    transparent = _transparent(type(module))  # type: ignore[arg-type] # a class has the hash of a class
    for key, child in module._modules.items():  # noqa: SLF001 # `named_children` hides shared ones
        if child is None:
            continue
        if key in transparent:
            yield from walk(child, path)
        else:
            yield from walk(child, _inside(path, key))


def _inside(path: str, key: str) -> str:
    return f"{path}.{key}".removeprefix(".")


def unwrapped(model: Any) -> Any:
    """Return the module inside `DistributedDataParallel` or an engine of DeepSpeed."""
    while not _EXCHANGEABLE.isdisjoint(class_names(model)):
        kind: Any = type(model)
        if "module" not in _transparent(kind):
            break
        model = model.module
    return model


def slots(model: Any) -> Iterator[ParameterSlot]:
    for path, module in walk(model):
        # `named_parameters` shows a tied parameter once, under its first name.
        for key, param in module._parameters.items():  # noqa: SLF001
            if param is not None:
                yield ParameterSlot(_inside(path, key), module, key)


@_live.uncollected()
def from_model(model: Any) -> Manifest:
    """Return the manifest of a ``torch.nn.Module``, on any device, ``meta`` included."""
    if not hasattr(model, "_modules") or not hasattr(model, "_parameters"):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    # The places of each parameter by its id: a tied one has several.
    groups = grouped(slots(model), lambda slot: id(slot.owner._parameters[slot.key]))  # noqa: SLF001 # the slot itself
    names = named_modules(model)
    root = names[ROOT]
    # The ids of the modules whose parameters `fully_shard` manages.
    managed: set[int] = set()
    for _, module in walk(model):
        if "FSDPModule" in class_names(module):
            managed.update(map(id, module.modules()))
    notes: tuple[str, ...] = ()
    if "DeepSpeedEngine" in class_names(model):
        notes = (ENGINE_NOTE,)
    return Manifest(
        origin=type(root).__name__,
        params=tuple(_param(group, managed) for group in groups.values()),
        modules=tuple(_modules(names)),
        model_type=class_names(root),
        notes=notes,
    )


def named_modules(model: Any) -> dict[str, Any]:
    modules = {}
    for path, module in walk(model):
        # The innermost module of the wrappers comes last.
        modules[path or ROOT] = module
    return modules


def _modules(names: Mapping[str, Any]) -> Iterator[ModuleEntry]:
    for name, *aliases in grouped(names, lambda name: id(names[name])).values():
        yield ModuleEntry(name, tuple(aliases), class_names(names[name]))


def _sharding(tensor: Any, owner: Any, managed: set[int]) -> Sharding:
    # FullyShardedDataParallel marks its flat parameters, and with `use_orig_params` the views of them.
    if getattr(tensor, "_fsdp_flattened", False):
        return "FullyShardedDataParallel"
    if "DTensor" not in class_names(tensor):
        return ""
    if id(owner) in managed:
        return "fully_shard"
    return "tensor parallel"


def _param(group: list[ParameterSlot], managed: set[int]) -> Param:
    first = group[0]
    tensor = first.owner._parameters[first.key]  # noqa: SLF001
    name, *aliases = dict.fromkeys(names_of(group))
    types: dict[str, None] = {}
    for slot in group:
        types |= dict.fromkeys(class_names(slot.owner))
    shape: tuple[int, ...] | None = None
    if "UninitializedTensorMixin" not in class_names(tensor):
        # ZeRO 3 leaves an empty tensor in the place of a parameter.
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return Param(
        name=name,
        aliases=tuple(aliases),
        shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
        module_type=tuple(types),
        sparse=any(vars(slot.owner).get("sparse") is True for slot in group),
        sharding=_sharding(tensor, first.owner, managed),
    )
