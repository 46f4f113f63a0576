"""Statistics of a sweep: from its ledger to comparisons, verdicts and a headline; no file, no drawing.

`summary`, `paired_stats` and `attribution` compare arms, `forked` reads runs from shared checkpoints,
`headline` and `verdict_text` say what follows.
"""
