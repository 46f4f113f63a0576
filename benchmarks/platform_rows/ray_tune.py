"""Ray Tune with OptunaSearch and the MLflow callback, used as its documentation shows.

Each trial makes 20 reports and does nothing else.

Arguments: folder, trials, workers, `reuse` or `default`, and the file that takes the figures.
"""

import json
import os
import sys
import time
from pathlib import Path

RECORDS = 20


def trainable(config: dict) -> None:
    """Make 20 reports, and compute nothing."""
    from ray import tune

    for step in range(1, RECORDS + 1):
        tune.report({"loss": (config["x"] - 0.3) ** 2 + (config["y"] + 0.2) ** 2 + 1 / step})


def main(folder: Path, trials: int, workers: int, reuse: bool) -> dict[str, float]:
    """Return the seconds of starting Ray, of `fit`, and from the first trial's start to the last's end."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    }
    from mlflow import MlflowClient

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    experiment = MlflowClient(uri).create_experiment(
        "tune", artifact_location=(folder / "artifacts").as_uri()
    )
    started = time.perf_counter()
    import ray
    from ray import tune
    from ray.air.integrations.mlflow import MLflowLoggerCallback
    from ray.tune.search.optuna import OptunaSearch

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    up = time.perf_counter()
    tuner = tune.Tuner(
        trainable,
        param_space={"x": tune.uniform(-1.0, 1.0), "y": tune.uniform(-1.0, 1.0)},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", search_alg=OptunaSearch(seed=0), num_samples=trials,
            max_concurrent_trials=workers, reuse_actors=reuse,
        ),
        run_config=tune.RunConfig(
            name="tune", storage_path=str(folder / "results"), verbose=0,
            callbacks=[MLflowLoggerCallback(tracking_uri=uri, experiment_name="tune")],
        ),
    )  # fmt: skip
    results = tuner.fit()
    fitted = time.perf_counter()
    runs = MlflowClient(uri).search_runs([experiment], max_results=10_000)
    assert len(runs) == len(results) == trials
    assert all(run.info.status == "FINISHED" for run in runs)
    trials_s = (max(run.info.end_time for run in runs) - min(run.info.start_time for run in runs)) / 1000
    return {"start_s": up - started, "fit_s": fitted - up, "trials_s": trials_s}


if __name__ == "__main__":
    folder, count, slots, how, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(main(Path(folder), int(count), int(slots), how == "reuse")))
