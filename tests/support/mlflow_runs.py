"""Runs of a sweep and their metrics, as a client of MLflow reads them."""

from collections import Counter


def runs(client, sweep: str, kind: str = "trial") -> list:
    """Return the runs of a sweep's experiment that have this tag `ablate.kind`."""
    experiment = client.get_experiment_by_name(sweep)
    return client.search_runs([experiment.experiment_id], f"tags.`ablate.kind` = '{kind}'", max_results=1000)


def histories(client, run) -> Counter:
    """Return (metric, step, value, timestamp) of all values of a run, counted."""
    keys = run.data.metrics
    return Counter(
        (m.key, m.step, m.value, m.timestamp)
        for key in keys
        for m in client.get_metric_history(run.info.run_id, key)
    )
