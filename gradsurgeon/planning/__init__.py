"""Rules bound to the names of a model: the manifest, the binding and the printed plan."""

from gradsurgeon.planning.binding import NO_MATCH as NO_MATCH
from gradsurgeon.planning.binding import bind as bind
from gradsurgeon.planning.binding import curves_of_nothing as curves_of_nothing
from gradsurgeon.planning.manifest import ROOT as ROOT
from gradsurgeon.planning.manifest import Manifest as Manifest
from gradsurgeon.planning.manifest import Module as Module
from gradsurgeon.planning.manifest import Param as Param
from gradsurgeon.planning.manifest import class_names as class_names
from gradsurgeon.planning.manifest import from_model as from_model
from gradsurgeon.planning.manifest import is_scripted as is_scripted
from gradsurgeon.planning.manifest import named_modules as named_modules
from gradsurgeon.planning.manifest import slots as slots
from gradsurgeon.planning.manifest import unwrapped as unwrapped
from gradsurgeon.planning.matching import Match as Match
from gradsurgeon.planning.matching import Matcher as Matcher
from gradsurgeon.planning.matching import is_for as is_for
from gradsurgeon.planning.matching import name_indexes as name_indexes
from gradsurgeon.planning.obstacles import MatchedRules as MatchedRules
from gradsurgeon.planning.obstacles import Obstacle as Obstacle
from gradsurgeon.planning.obstacles import shortfalls as shortfalls
from gradsurgeon.planning.plan import Binding as Binding
from gradsurgeon.planning.plan import Plan as Plan
