"""Document -> RuleSet: every problem of a rule file in one pass, each at its place."""

from gradsurgeon.schema._document import FORMAT as FORMAT
from gradsurgeon.schema._document import VERSION as VERSION
from gradsurgeon.schema._document import Built as Built
from gradsurgeon.schema._document import Located as Located
from gradsurgeon.schema._document import bounded as bounded
from gradsurgeon.schema._tree import Files as Files
from gradsurgeon.schema._tree import Inspection as Inspection
from gradsurgeon.schema._tree import RuleSet as RuleSet
from gradsurgeon.schema._tree import from_rules as from_rules
from gradsurgeon.schema._tree import inspect as inspect
from gradsurgeon.schema._tree import pack as pack
from gradsurgeon.schema._tree import validate as validate
