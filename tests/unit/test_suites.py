"""What is run by default shows something of everything; what is slow is left out, and run in CI."""

from __future__ import annotations

import setups


def test_every_cell_of_the_table_of_set_ups_is_backed_by_a_quick_test() -> None:
    cells = setups.collected()
    claims = {(cell.setup, cell.point, cell.differs, cell.refused) for cell in cells}
    quick = {
        (cell.setup, cell.point, cell.differs, cell.refused) for cell in cells if not cell.slow
    }
    assert claims - quick == set()
