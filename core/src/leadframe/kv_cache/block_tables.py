"""Block tables: one row of a shared matrix per request that holds blocks.

One matrix, so that a batch of tables is one gather and no other copy of a table exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTables:
    """Rows of block ids in token order. Entries past a table's end are 0, the null block.

    Attributes:
      ids: int32 [rows, width]; replaced by a larger array when it has to grow.
      lengths: blocks in each row; 0 for rows that nobody uses.
    """

    def __init__(self, num_rows: int = 16, width: int = 16) -> None:
        self.ids: npt.NDArray[np.int32] = np.zeros((num_rows, width), np.int32)
        self.lengths = [0] * num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def claim(self, block_ids: Sequence[int]) -> int:
        """Starts a table and returns its row."""
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        self.extend(row, block_ids)
        return row

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        """Appends blocks to a table: tables never change otherwise."""
        start = self.lengths[row]
        end = start + len(block_ids)
        if end > self.ids.shape[1]:
            self._widen(end)
        self.ids[row, start:end] = block_ids
        self.lengths[row] = end

    def view(self, row: int) -> npt.NDArray[np.int32]:
        """Returns a table: int32 [blocks], a view that later calls may leave stale."""
        return self.ids[row, : self.lengths[row]]

    def release(self, row: int) -> list[int]:
        """Ends a table and returns its blocks in token order."""
        table = self.view(row)
        block_ids: list[int] = table.tolist()
        table[:] = 0
        self.lengths[row] = 0
        self._free_rows.append(row)
        return block_ids

    def _add_rows(self) -> None:
        num_rows, width = self.ids.shape
        self.ids = np.concatenate([self.ids, np.zeros((num_rows, width), np.int32)])
        self.lengths += [0] * num_rows
        self._free_rows += range(2 * num_rows - 1, num_rows - 1, -1)

    def _widen(self, width: int) -> None:
        num_rows, old = self.ids.shape
        wider = np.zeros((num_rows, max(width, 2 * old)), np.int32)
        wider[:, :old] = self.ids
        self.ids = wider
