"""The records of a ledger as an Arrow table: ten million rows in seconds, without a Python object a row.

They are read by the connection that the ledger has. A second SQLite library in the process, such as that of
an Arrow driver, is not used: the locks of a file belong to the process, so closing it there releases those of
`sqlite3`, the log's index is cut short under its mapping, and the process dies of SIGBUS.
"""

import sys
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ablate.store.ledger_file import LedgerFile

_NULL = -sys.float_info.max
"""Number in place of NULL until the rows are an array, which has no None."""


def record_table(ledger: LedgerFile, trials: Sequence[int], names: Sequence[int]) -> pa.Table:
    """Return the records of these trials and metrics, both given by their numbers in this ledger: columns
    trial, name, step (integers) and value (double, NaN for NULL)."""
    inside = [
        f"{column} IN ({','.join(map(str, numbers))})"
        for column, numbers in (("trial", trials), ("name", names))
    ]
    cursor = ledger.db.cursor()
    cursor.row_factory = None
    cursor.execute(
        f"SELECT trial, name, step, ifnull(value, ?) FROM records WHERE {' AND '.join(inside)}", (_NULL,)
    )
    columns = [("trial", np.int64), ("name", np.int64), ("step", np.int64), ("value", np.float64)]
    rows = np.fromiter(cursor, np.dtype(columns))
    rows["value"][rows["value"] == _NULL] = np.nan
    return pa.table({name: rows[name] for name, _ in columns})
