"""Projections of the ledger into MLflow and other trackers. The only folder that imports MLflow or
TensorBoard.

`tracker` has the operations of a tracker, finds those of other packages, and has the thread that calls them;
`tensorboard` writes event files, and `event_files` reads those of others. The other files are MLflow's:
`runs` names and tags runs; `mlflow_tracker` writes them by MLflow's client; `access` opens that client, says
its errors in a sentence, and adds a report's files; `database` makes a SQLite database; `stored_runs` reads
runs of others.
"""
