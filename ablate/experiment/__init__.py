"""From a YAML file to arms and trial specs, or every mistake at its place, before anything runs. Torch is never imported.

`schema` says what a file may hold, `load` reads one, `arms` turns knobs into resolved recipes and workloads, `trial_spec` is what a
trial is identified by.
"""
