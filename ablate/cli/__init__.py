"""The command line: one file for each command, with its options, its output and its exit statuses.

The work itself is done by the packages below. `app` assembles the commands, `common` holds shared options,
and `settings` finds the state folder, Ray and MLflow.
"""
