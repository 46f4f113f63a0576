"""Storage of what was recorded: trial folders, a sweep's ledger, records, seals and registrations.

`trial_store` holds the results of single trials, `ledger` what one sweep wants of them. Readers open a
ledger by `checked_ledger`, and `records` reads measurements as one frame.
"""
