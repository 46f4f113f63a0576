"""Projections of the ledger into MLflow and other trackers. The only folder that imports MLflow or
TensorBoard.

`tracker` has the operations of a tracker and finds those of other packages; `follower` is the thread that
calls them; `tensorboard` writes event files, and `event_files` reads those of others. The other files are
MLflow's: `runs` names and tags runs; `mlflow_tracker` writes them by MLflow's client; `access` opens that
client and explains its errors; `database` makes a SQLite database; `attach` adds a report's files;
`stored_runs` reads runs of others.
"""
