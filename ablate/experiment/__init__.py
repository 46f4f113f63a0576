"""Turn a YAML file into arms and trial specs, or report every mistake at its line and column. Torch is never
imported.

`schema` defines the keys of a file, `load` reads one, `arms` resolves knobs to recipes and workloads,
`expand` and `baseline` list the arms and their baselines, `trial_spec` identifies a trial.
"""
