"""The command line: one file for each command, with its options, its output and its exit statuses.

The work itself is done by the packages below. `commands` is the table of the verbs, `options` holds options
that several of them share, `common` exit statuses and the console, and `settings` finds the state folder, Ray
and MLflow.
"""
