"""The command line: one command a file. Options, printing and exit statuses; what a command does is in the packages below.

`app` puts the commands together, `common` has what they share, `settings` finds where the state folder, Ray and MLflow are.
"""
