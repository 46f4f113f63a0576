"""What a sweep recorded, and what it says.

`trial_store` and `ledger` keep it, `records` reads it back as one frame, `summary`, `paired_stats` and
`attribution` compare arms, and `answer`, `page` and `figures` are what a report is made of.
"""
