"""Results of a sweep: storage, statistics, and the parts of reports.

`trial_store` and `ledger` store results, and `records` reads them back as one frame. `summary`,
`paired_stats` and `attribution` compare arms. `answer`, `page` and `figures` make the parts of a report.
"""
