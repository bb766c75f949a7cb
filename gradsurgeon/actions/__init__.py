"""The actions: one file each. This folder is searched for them, and no list names them."""

import pkgutil
from importlib import import_module

from gradsurgeon.actions._base import Example as Example
from gradsurgeon.actions._base import Moment as Moment
from gradsurgeon.actions._base import Rule as Rule
from gradsurgeon.actions._base import check_rule as check_rule
from gradsurgeon.actions._base import in_order as in_order
from gradsurgeon.actions._base import known_actions as known_actions
from gradsurgeon.actions._effects import NEVER as NEVER
from gradsurgeon.actions._effects import At as At
from gradsurgeon.actions._effects import ByNorm as ByNorm
from gradsurgeon.actions._effects import Combination as Combination
from gradsurgeon.actions._effects import Decision as Decision
from gradsurgeon.actions._effects import Edit as Edit
from gradsurgeon.actions._effects import Examination as Examination
from gradsurgeon.actions._effects import LossComparison as LossComparison
from gradsurgeon.actions._effects import MaskedUpdate as MaskedUpdate
from gradsurgeon.actions._effects import Observer as Observer
from gradsurgeon.actions._effects import Shard as Shard
from gradsurgeon.actions._effects import Spikes as Spikes
from gradsurgeon.actions._fields import FROM_LIST as FROM_LIST
from gradsurgeon.actions._fields import TARGETS as TARGETS
from gradsurgeon.actions._fields import Flaw as Flaw
from gradsurgeon.actions._fields import TargetKind as TargetKind
from gradsurgeon.actions._fields import described as described
from gradsurgeon.actions._fields import flawed as flawed
from gradsurgeon.actions._fields import spelled as spelled
from gradsurgeon.actions._fields import written as written
from gradsurgeon.actions._kinds import CaptureRule as CaptureRule
from gradsurgeon.actions._kinds import CheckRule as CheckRule
from gradsurgeon.actions._kinds import EditRule as EditRule
from gradsurgeon.actions._kinds import FreezeRule as FreezeRule
from gradsurgeon.actions._kinds import LossRule as LossRule
from gradsurgeon.actions._kinds import ObserverRule as ObserverRule
from gradsurgeon.actions._kinds import TrapRule as TrapRule
from gradsurgeon.actions._options import Options as Options
from gradsurgeon.actions._options import Steps as Steps
from gradsurgeon.actions._options import Where as Where
from gradsurgeon.actions._options import read_options as read_options

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

# The actions of gradsurgeon; `known_actions` also has the user's own.
ACTIONS: dict[str, type[Rule]] = dict(known_actions)
globals().update({rule.__name__: rule for rule in ACTIONS.values()})
