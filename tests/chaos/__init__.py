"""Faults of every kind against real sweeps, with one audit: `make chaos KILLS=50 CORRUPTIONS=50 SEED=1`.

The promise: whatever is killed or damaged, a sweep loses nothing, does nothing twice, and shows no silently wrong number. `kills`
ends processes of a running sweep and its servers; `copies` damages state folders, by the table in `corruptions`, and asks every command;
`mutants_yaml` and `mutants_runs` change files that users give. `audit` decides, and `report` prints.
"""
