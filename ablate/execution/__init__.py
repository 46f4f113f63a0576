"""Run a sweep's trials, survive failures, and keep Optuna and MLflow in step with the ledger.

`controller` is one process and one loop; `scheduler` decides what runs next; `workers` run trials, each in a
`trial_process` under a `supervisor`; `search` and `tracking` are projections of the ledger, which can be
dropped and made again.
"""
