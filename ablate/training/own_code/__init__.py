"""Trials that users' functions and commands compute: their interface, their processes and their mistakes."""
