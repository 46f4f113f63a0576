"""Seeded mistakes in the package, which the tests must see: a guard while much code is deleted or moved.

`run.py` draws one-token changes of functions (`changes.py`, `draw.py`) and runs the cheapest test files that cover
each (`coverage_map.py`), in forks of a warm process (`processes.py`) that import the changed source in place of the
file (`in_place/`). Files of the package are never written. `by_hand.py` has mistakes that people make, each with the
test file that must see it. `compare.py` compares the results of two commits.
"""
