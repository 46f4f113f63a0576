"""Optuna and MLflow in one process, used as their documentation shows: no-op trials of 20 reports each.

Arguments: folder, trials, and the file that takes the figures.
"""

import json
import os
import sys
import time
from pathlib import Path

RECORDS = 20


def main(folder: Path, trials: int) -> dict[str, float]:
    """Return the seconds from the first trial's start to the last one's end."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    mlflow.set_experiment(
        experiment_id=mlflow.create_experiment("plain", artifact_location=(folder / "artifacts").as_uri())
    )
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'optuna.db'}", sampler=optuna.samplers.TPESampler(seed=0)
    )

    def objective(trial: optuna.Trial) -> float:
        x, y = (trial.suggest_float(name, -1.0, 1.0) for name in "xy")
        with mlflow.start_run():
            mlflow.log_params(trial.params)
            for step in range(1, RECORDS + 1):
                loss = (x - 0.3) ** 2 + (y + 0.2) ** 2 + 1 / step
                trial.report(loss, step)
                mlflow.log_metric("loss", loss, step=step)
        return loss

    started = time.perf_counter()
    study.optimize(objective, n_trials=trials)
    return {"trials_s": time.perf_counter() - started}


if __name__ == "__main__":
    folder, count, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(main(Path(folder), int(count))))
