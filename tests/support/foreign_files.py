"""Files of every source of runs that were not started here, all with the same values: `TRUTH`."""

import csv
import io
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ARMS, SEEDS = ("bf16", "nvfp4"), (0, 1)
STEPS = (10, 20, 30, 40, 50)
Key = tuple[str, int, str, int]
"""Arm, seed, metric and step."""


def truth() -> dict[Key, float]:
    """Return the values that all files have: each is another number, but for one NaN and one infinity."""
    values = {}
    for a, arm in enumerate(ARMS):
        for seed in SEEDS:
            for step in STEPS:
                values[arm, seed, "train/loss", step] = round(2 + a / 2 + seed / 8 + 1 / step, 5)
                if step % 20 == 0:
                    values[arm, seed, "val/loss", step] = round(3 + a / 2 + seed / 8 + 1 / step, 5)
    values["nvfp4", 1, "train/loss", 50] = math.nan
    values["nvfp4", 0, "train/loss", 50] = math.inf
    return values


TRUTH = truth()


@dataclass
class Files:
    """Files of one source, and how they are read."""

    contents: dict[str, bytes]
    places: list[str]
    """Places below the folder."""
    columns: dict[str, str] = field(default_factory=dict)
    logs: str | None = None
    checked: bool = False
    """They have checksums."""

    @property
    def of_rows(self) -> bool:
        """Return True for files of rows below a header."""
        return not self.checked and self.logs in (None, "lightning")


def values_of_runs() -> Iterator[tuple[str, int, int, float | None, float | None]]:
    for arm in ARMS:
        for seed in SEEDS:
            for step in STEPS:
                yield (
                    arm,
                    seed,
                    step,
                    TRUTH[arm, seed, "train/loss", step],
                    TRUTH.get((arm, seed, "val/loss", step)),
                )


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)


def _csv(rows: list[list[str]]) -> bytes:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue().encode()


def csv_long() -> Files:
    """One table of all steps."""
    rows = [[a, str(s), str(t), _text(x), _text(y), "0.1"] for a, s, t, x, y in values_of_runs()]
    return Files(
        {"runs.csv": _csv([["arm", "seed", "step", "train/loss", "val/loss", "lr"], *rows])}, ["runs.csv"]
    )


def csv_wide() -> Files:
    """One table of final values."""
    rows = [[a, str(s), _text(y), "64"] for a, s, t, x, y in values_of_runs() if t == 40]
    return Files({"runs.csv": _csv([["arm", "seed", "val/loss", "width"], *rows])}, ["runs.csv"])


def csv_histories() -> Files:
    """A file for each run, as W&B's API writes its history."""
    contents = {
        f"{arm}-s{seed}.csv": _csv(
            [["", "_step", "train/loss", "val/loss", "_runtime"]]
            + [
                [str(n), str(t), _text(x), _text(y), "1.5"]
                for n, (a, s, t, x, y) in enumerate(values_of_runs())
                if (a, s) == (arm, seed)
            ]
        )
        for arm in ARMS
        for seed in SEEDS
    }
    return Files(contents, ["{arm}-s{seed}.csv"])


def wandb_chart() -> Files:
    """A chart of W&B, one run a column."""
    names = [f"{arm}-s{seed} - train/loss" for arm in ARMS for seed in SEEDS]
    header = ["Step", *(name + end for name in names for end in ("", "__MIN", "__MAX"))]
    rows = [
        [str(step), *(_text(TRUTH[a, s, "train/loss", step]) for a in ARMS for s in SEEDS for _ in range(3))]
        for step in STEPS
    ]
    return Files({"chart.csv": _csv([header, *rows])}, ["chart.csv"], {"name": "{arm}-s{seed}"})


def json_lines() -> Files:
    """One file of all steps."""
    rows = [
        {"arm": a, "seed": s, "step": t, "train": {"loss": x}, **({} if y is None else {"val/loss": y})}
        for a, s, t, x, y in values_of_runs()
    ]
    return Files({"runs.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()}, ["runs.jsonl"])


def parquet() -> Files:
    """One table of all steps."""
    import pyarrow as pa
    import pyarrow.parquet

    columns = [*zip(*values_of_runs(), strict=True)]
    names = ["arm", "seed", "step", "train/loss", "val/loss"]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({n: pa.array(c) for n, c in zip(names, columns, strict=True)}), file)
    return Files({"runs.parquet": file.getvalue()}, ["runs.parquet"])


def states() -> Files:
    """A trainer_state.json for each run."""
    contents = {}
    for arm in ARMS:
        for seed in SEEDS:
            history: list[dict[str, float]] = []
            for a, s, t, x, y in values_of_runs():
                if (a, s) == (arm, seed):
                    history.append({"epoch": t / 100, "loss": x, "step": t})
                    history += [] if y is None else [{"epoch": t / 100, "eval_loss": y, "step": t}]
            contents[f"{arm}-s{seed}.json"] = json.dumps(
                {"log_history": history, "global_step": 50}, indent=1
            ).encode()
    return Files(contents, ["{arm}-s{seed}.json"])


def _logs(lines: Callable[[int, float, float | None], list[str]], logs: str, ending: str = "log") -> Files:
    contents = {}
    for arm in ARMS:
        for seed in SEEDS:
            text = [
                line
                for a, s, t, x, y in values_of_runs()
                if (a, s) == (arm, seed)
                for line in ["hello", *lines(t, x, y)]
            ]
            contents[f"{arm}-s{seed}.{ending}"] = "".join(f"{line}\n" for line in text).encode()
    return Files(contents, [f"{{arm}}-s{{seed}}.{ending}"], {}, logs)


def torchtitan() -> Files:
    """Logs of torchtitan, in colours."""
    memory = "\x1b[38;2;54;234;195mmemory:  2.11GiB(2.67%)  \x1b[34mtps: 9,871"

    def lines(step: int, train: float, val: float | None) -> list[str]:
        first = (
            f"[rank0]:[titan] - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {train:8.5f}  "
            f"\x1b[38;2;180;60;0mgrad_norm:  1.5000  {memory}  \x1b[36mtflops: 0.01  \x1b[35mmfu: N/A\x1b[39m"
        )
        second = f"[rank0]:[titan] - root - INFO - \x1b[33mvalidate step: {step:2}  \x1b[32mloss: {val or 0:7.5f}  {memory}\x1b[39m"
        return [first] if val is None else [first, second]

    return _logs(lines, "torchtitan")


def megatron() -> Files:
    """Logs of Megatron-LM, which prints no NaN."""

    def lines(step: int, train: float, val: float | None) -> list[str]:
        loss = "" if math.isnan(train) else f" lm loss: {train:.6E} |"
        first = (
            f" [2026-11-27 19:01:39.743748] iteration {step:8d}/      50 | consumed samples: {step * 8:12d} |{loss}"
            " grad norm: 2.431 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        second = f" validation loss at iteration {step} | lm loss value: {val or 0:.6E} | "
        return [first] if val is None else [first, "-" * 20, second]

    return _logs(lines, "megatron")


def modded_nanogpt() -> Files:
    """Logs of modded-nanogpt."""

    def lines(step: int, train: float, val: float | None) -> list[str]:
        texts = [f"train_loss:{train:.5f}", *([] if val is None else [f"val_loss:{val:.5f}"])]
        return [f"step:{step}/50 {text} train_time:{step * 63}ms step_avg:63.00ms" for text in texts]

    return _logs(lines, "modded-nanogpt")


def trainer() -> Files:
    """Dicts that the Trainer of transformers prints."""

    def lines(step: int, train: float, val: float | None) -> list[str]:
        epoch = f"{step / 100:.4g}"
        first = str({"loss": f"{train:.6g}", "grad_norm": "1.5", "epoch": epoch})
        return [first] if val is None else [first, str({"eval_loss": f"{val:.6g}", "epoch": epoch})]

    return _logs(lines, "hf:10")


def expression() -> Files:
    """Logs of a script, by an expression."""

    def lines(step: int, train: float, val: float | None) -> list[str]:
        return [f"iter {step}: loss {train!r}, time 3.2ms"] + ([f"iter {step}: eval {val!r}."] if val else [])

    form = r"^iter (?P<step>\d+): (?:loss (?P<loss>\S+), time [\d.]+ms|eval (?P<val_loss>\S+)\.)$"
    return _logs(lines, f"regex:{form}")


def lightning() -> Files:
    """Files of Lightning's CSVLogger, whose steps count from 0."""
    contents = {}
    for arm in ARMS:
        for seed in SEEDS:
            rows = [["epoch", "step", "train_loss", "val_loss"]]
            for a, s, t, x, y in values_of_runs():
                if (a, s) == (arm, seed):
                    rows.append(["0", str(t - 1), _text(x), ""])
                    rows += [] if y is None else [["0", str(t - 1), "", _text(y)]]
            contents[f"{arm}-s{seed}.csv"] = _csv(rows)
    return Files(contents, ["{arm}-s{seed}.csv"], {}, "lightning")


def tensorboard() -> Files:
    """A folder of event files for each run."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    contents = {}
    for arm in ARMS:
        for seed in SEEDS:
            file = io.BytesIO()
            writer = RecordWriter(file)
            writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
            for a, s, t, x, y in values_of_runs():
                for tag, value in (("train/loss", x), ("val/loss", y)):
                    if (a, s) == (arm, seed) and value is not None:
                        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                        writer.write(Event(wall_time=1.0, step=t, summary=summary).SerializeToString())
            contents[f"{arm}-s{seed}/events.out.tfevents.1.host"] = file.getvalue()
    return Files(contents, ["."], {"name": "{arm}-s{seed}"}, checked=True)


def wandb_folders() -> Files:
    """Folders of W&B's offline runs."""
    from ablate.judging.wandb_folders import message_class

    contents = {}
    for arm in ARMS:
        for seed in SEEDS:
            first = message_class()()
            first.run.display_name = f"{arm} {seed}"
            for key, setting in (("arm", arm), ("seed", seed)):
                first.run.config.update.add(key=key, value_json=json.dumps(setting))
            records = [first]
            for a, s, t, x, y in values_of_runs():
                if (a, s) == (arm, seed):
                    record = message_class()()
                    record.history.step.num = t
                    record.history.item.add(nested_key=["train/loss"], value_json=json.dumps(x))
                    if y is not None:
                        record.history.item.add(nested_key=["val", "loss"], value_json=json.dumps(y))
                    records.append(record)
            name = f"offline-run-{arm}{seed}/run-{arm}{seed}.wandb"
            contents[name] = b":W&B\xe1\xbe\x00" + b"".join(
                map(_framed, (r.SerializeToString() for r in records))
            )
    return Files(contents, ["."], checked=True)


def _framed(body: bytes) -> bytes:
    return struct.pack("<IHB", zlib.crc32(b"\x01" + body), len(body), 1) + body


SOURCES: dict[str, Callable[[], Files]] = {
    "csv, long": csv_long,
    "csv, wide": csv_wide,
    "csv, a file a run": csv_histories,
    "W&B chart": wandb_chart,
    "json lines": json_lines,
    "parquet": parquet,
    "trainer_state.json": states,
    "log of torchtitan": torchtitan,
    "log of Megatron": megatron,
    "log of modded-nanogpt": modded_nanogpt,
    "log of the Trainer": trainer,
    "log by an expression": expression,
    "Lightning's csv": lightning,
    "TensorBoard": tensorboard,
    "W&B folders": wandb_folders,
}
"""Every source, by its name in the outcomes."""


def expected(name: str) -> dict[Key, float]:
    """Return the values that the unchanged files of a source give."""
    if name == "csv, wide":
        return {(a, s, m, 0): v for (a, s, m, t), v in TRUTH.items() if m == "val/loss" and t == 40}
    return {key: value for key, value in TRUTH.items() if name != "W&B chart" or key[2] == "train/loss"}


def write(files: Files, folder: Path) -> None:
    """Write the files of a source below a folder."""
    for name, content in files.contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def result(files: Files, folder: Path) -> tuple[dict[Key, float], list[str]]:
    """Return the values that the package reads, without those that only some sources have, and what it says.

    Raises:
        InputError: the package refuses the files.
    """
    from ablate.judging.columns import Columns
    from ablate.judging.sources import read

    found = read([str(folder / place) for place in files.places], Columns(**files.columns), logs=files.logs)
    values = {
        (run.arm, run.seed if run.seed is not None else -1, metric, step): value
        for run in found.runs
        for metric, series in run.records.items()
        for step, value in series.items()
        if not metric.startswith(_BESIDE) and metric not in NOT_COMPARED
    }
    return values, found.said


NOT_COMPARED = ("grad/norm", "train/lr", "lr", "width", "grad_norm", "epoch", "_runtime")
"""Columns and metrics beside the two that all sources have."""
_BESIDE = ("throughput/", "val/throughput/", "train/samples", "train/skipped", "train/nan", "val/perplexity")


def equal(one: float, other: float) -> bool:
    """Return True for equal values, to the 32 bits that TensorBoard keeps; NaN equals NaN."""
    return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-6)
