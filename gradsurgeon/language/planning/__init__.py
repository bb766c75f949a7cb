"""Rules bound to the names of a model: the manifest, the binding and the printed plan."""

from gradsurgeon.language.planning.binding import NO_MATCH as NO_MATCH
from gradsurgeon.language.planning.binding import bind as bind
from gradsurgeon.language.planning.binding import curves_of_nothing as curves_of_nothing
from gradsurgeon.language.planning.manifest import ENGINE_NOTE as ENGINE_NOTE
from gradsurgeon.language.planning.manifest import ROOT as ROOT
from gradsurgeon.language.planning.manifest import Manifest as Manifest
from gradsurgeon.language.planning.manifest import ModuleEntry as ModuleEntry
from gradsurgeon.language.planning.manifest import Param as Param
from gradsurgeon.language.planning.manifest import class_names as class_names
from gradsurgeon.language.planning.manifest import from_model as from_model
from gradsurgeon.language.planning.manifest import is_scripted as is_scripted
from gradsurgeon.language.planning.manifest import named_modules as named_modules
from gradsurgeon.language.planning.manifest import slots as slots
from gradsurgeon.language.planning.manifest import unwrapped as unwrapped
from gradsurgeon.language.planning.matching import Match as Match
from gradsurgeon.language.planning.matching import Matcher as Matcher
from gradsurgeon.language.planning.matching import is_for as is_for
from gradsurgeon.language.planning.matching import name_indexes as name_indexes
from gradsurgeon.language.planning.obstacles import MatchedRules as MatchedRules
from gradsurgeon.language.planning.obstacles import Obstacle as Obstacle
from gradsurgeon.language.planning.obstacles import shortfalls as shortfalls
from gradsurgeon.language.planning.plan import Binding as Binding
from gradsurgeon.language.planning.plan import Plan as Plan
from gradsurgeon.language.planning.reviewed import check_reviewed as check_reviewed
from gradsurgeon.language.planning.reviewed import complaints_of as complaints_of
