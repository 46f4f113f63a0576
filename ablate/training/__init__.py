"""Computation of one trial: data, model, training loop and measurements.

Nothing here imports the sweep, the search or a tracker.
"""
