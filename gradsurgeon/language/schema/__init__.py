"""Document -> RuleSet: every problem of a rule file in one pass, each at its place."""

from gradsurgeon.language.schema._document import FORMAT as FORMAT
from gradsurgeon.language.schema._document import VERSION as VERSION
from gradsurgeon.language.schema._document import Built as Built
from gradsurgeon.language.schema._document import Located as Located
from gradsurgeon.language.schema._document import bounded as bounded
from gradsurgeon.language.schema._document import problem_of as problem_of
from gradsurgeon.language.schema._document import tidy as tidy
from gradsurgeon.language.schema._tree import Inspection as Inspection
from gradsurgeon.language.schema._tree import RuleSet as RuleSet
from gradsurgeon.language.schema._tree import from_rules as from_rules
from gradsurgeon.language.schema._tree import pack as pack
from gradsurgeon.language.schema._tree import validate as validate
