"""Runs that were not started here: their sources, and the ledger that they are judged from."""
