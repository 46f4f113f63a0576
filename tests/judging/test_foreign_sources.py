"""Sources of runs that were not started here: each gives the same runs, and what it cannot give is refused."""

import json
import math

import pytest
from support import foreign_files

import ablate
from ablate.errors import InputError
from ablate.judging import sources
from ablate.judging.columns import Columns
from ablate.judging.sources import read

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def written(folder, name):
    """Write the files of a source; return what they are."""
    files = foreign_files.SOURCES[name]()
    foreign_files.write(files, folder)
    return files


@pytest.mark.parametrize("name", foreign_files.SOURCES)
def test_every_source_gives_the_same_runs(name, tmp_path):
    values, _ = foreign_files.result(written(tmp_path, name), tmp_path)
    expected = foreign_files.expected(name)
    assert values.keys() == expected.keys()
    assert all(foreign_files.equal(value, expected[key]) for key, value in values.items())


def test_every_kind_of_source_is_among_these_files(tmp_path):
    claiming = {"mlflow"}  # a database, which test_judge.py makes by MLflow itself
    for number, name in enumerate(foreign_files.SOURCES):
        files = foreign_files.SOURCES[name]()
        foreign_files.write(files, folder := tmp_path / str(number))
        for path in (folder, folder / next(iter(files.contents))):
            kinds = (kind for kind, source in sources.SOURCES.items() if source.claims(path))
            claiming |= {*[*kinds][:1]} if files.logs is None else set()
    assert claiming == {*sources.SOURCES} - {"trainer states"}  # a folder of the files that json reads


@pytest.mark.parametrize("name", foreign_files.SOURCES)
def test_an_empty_file_is_refused_with_its_name(name, tmp_path):
    files = written(tmp_path, name)
    path = tmp_path / next(iter(files.contents))
    path.write_bytes(b"")
    if name == "TensorBoard":  # a run that logged nothing yet
        values, said = foreign_files.result(files, tmp_path)
        assert len({key[:2] for key in values}) == 3
        assert any("no scalars" in sentence for sentence in said)
        return
    with pytest.raises(InputError, match=path.name) as refusal:
        foreign_files.result(files, tmp_path)
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize("name", ["TensorBoard", "W&B folders"])
def test_a_file_that_is_cut_gives_what_is_whole_and_says_so(name, tmp_path):
    files = written(tmp_path, name)
    path = tmp_path / next(iter(files.contents))
    path.write_bytes(path.read_bytes()[:-3])
    values, said = foreign_files.result(files, tmp_path)
    assert foreign_files.expected(name).keys() - values.keys() == {("bf16", 0, "train/loss", 50)}
    assert any("cut" in sentence for sentence in said)


@pytest.mark.parametrize("name", ["TensorBoard", "W&B folders"])
def test_a_wrong_checksum_is_refused(name, tmp_path):
    files = written(tmp_path, name)
    path = tmp_path / next(iter(files.contents))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        foreign_files.result(files, tmp_path)


def test_a_whole_number_beyond_floats_is_refused_in_a_file_of_wandb(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_files, "values_of_runs", lambda: iter([("bf16", 0, 1, 10**400, None)]))
    files = written(tmp_path, "W&B folders")
    with pytest.raises(InputError, match="does not fit a float"):
        foreign_files.result(files, tmp_path)


def test_numbers_that_wandb_writes_as_texts_are_read_and_other_texts_are_not_metrics(tmp_path, monkeypatch):
    written_as = ["NaN", "Infinity", "-Infinity", "nano"]
    runs = [(arm, seed) for arm in foreign_files.ARMS for seed in foreign_files.SEEDS]
    rows = [(*run, step, text, None) for run in runs for step, text in enumerate(written_as)]
    monkeypatch.setattr(foreign_files, "values_of_runs", lambda: iter(rows))
    values, _ = foreign_files.result(written(tmp_path, "W&B folders"), tmp_path)
    read_as = [[repr(value) for key, value in values.items() if key[:2] == run] for run in runs]
    assert read_as == [["nan", "inf", "-inf"]] * len(runs)


def test_a_last_loss_that_wandb_writes_as_the_text_nan_counts_as_diverged(tmp_path, monkeypatch):
    runs = [(arm, seed) for arm in foreign_files.ARMS for seed in foreign_files.SEEDS]
    rows = [(*run, step, 3.0, None) for run in runs for step in (10, 20)]
    rows[-1] = (*runs[-1], 20, "NaN", None)
    monkeypatch.setattr(foreign_files, "values_of_runs", lambda: iter(rows))
    written(tmp_path, "W&B folders")
    (judged,) = ablate.judge(tmp_path, against="bf16", ignore=["State"]).arms
    assert (judged.arm, judged.runs, judged.verdict["diverged"]) == ("nvfp4", 1, 1)


@pytest.mark.parametrize("stack", ["torchtitan", "megatron", "modded-nanogpt"])
def test_a_log_says_which_lines_it_leaves_out(stack, tmp_path):
    files = written(tmp_path, f"log of {'Megatron' if stack == 'megatron' else stack}")
    path = tmp_path / "bf16-s0.log"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[3][:-30] + "\n", *lines[4:], lines[1][:-1]]))
    values, said = foreign_files.result(files, tmp_path)
    assert foreign_files.expected("").keys() - values.keys() == {("bf16", 0, "train/loss", 20)}
    assert any("a line is left out; line 4" in sentence for sentence in said)
    assert any("last line has no end" in sentence for sentence in said)


LOGS = [name for name in foreign_files.SOURCES if name.startswith("log ")]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", LOGS)
def test_a_log_with_a_byte_order_mark_is_read_in_its_encoding(name, encoding, tmp_path):
    files = written(tmp_path, name)
    for file, content in files.contents.items():
        (tmp_path / file).write_bytes(content.decode().encode(encoding))
    values, _ = foreign_files.result(files, tmp_path)
    assert values.keys() == foreign_files.expected(name).keys()


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_log_in_utf_16_without_a_mark_is_refused_with_what_converts_it(encoding, tmp_path):
    files = written(tmp_path, "log of torchtitan")
    path = tmp_path / "bf16-s0.log"
    path.write_bytes(path.read_text().encode(encoding))
    with pytest.raises(InputError, match=r"bf16-s0\.log: .*zero bytes.*iconv -f utf-16"):
        foreign_files.result(files, tmp_path)


@pytest.mark.parametrize("name", LOGS)
def test_a_log_of_one_line_without_an_end_is_refused_for_that_reason(name, tmp_path):
    files = written(tmp_path, name)
    path = tmp_path / next(iter(files.contents))
    lines = path.read_text().splitlines()
    for line in lines:
        path.write_text(line)
        with pytest.raises(InputError) as refusal:
            foreign_files.result(files, tmp_path)
        if "no line has metrics" in str(refusal.value) and "last line has no end" in str(refusal.value):
            return
    pytest.fail(f"{refusal.value}: no line alone is refused for its missing end")


def test_a_log_whose_lines_are_counted_is_refused_if_one_is_missing(tmp_path):
    for line in range(9):
        files = written(tmp_path, "log of the Trainer")
        path = tmp_path / "bf16-s0.log"
        lines = [line for line in path.read_text().splitlines(keepends=True) if "'loss'" in line]
        del lines[line % 4]  # any but the last
        path.write_text("".join(lines))
        with pytest.raises(InputError, match="about step"):
            foreign_files.result(files, tmp_path)


def test_a_chart_of_means_is_refused(tmp_path):
    files = written(tmp_path, "W&B chart")
    path = tmp_path / "chart.csv"
    lines = path.read_text().splitlines()
    cells = lines[2].split(",")
    cells[2] = "1.5"
    path.write_text("\n".join([*lines[:2], ",".join(cells), *lines[3:]]) + "\n")
    with pytest.raises(InputError, match=r"line 3: column 'bf16-s0 - train/loss__MIN': differs"):
        foreign_files.result(files, tmp_path)


def test_a_chart_over_time_is_refused(tmp_path):
    files = written(tmp_path, "W&B chart")
    path = tmp_path / "chart.csv"
    path.write_text(path.read_text().replace("Step", "Relative Time (Wall)"))
    with pytest.raises(InputError, match="choose Step"):
        foreign_files.result(files, tmp_path)


def test_a_table_of_runs_of_wandb_has_their_final_values_and_states(tmp_path):
    table = (
        '"Name","State","Notes","User","Tags","Created","Runtime","Sweep","lr","val/loss"\n'
        '"bf16-s0","finished","-","me","","2026","5","","0.001","3.25"\n'
        '"nvfp4-s0","crashed","-","me","","2026","5","","0.001","3.5"\n'
    )
    (tmp_path / "runs.csv").write_text(table)
    found = read([str(tmp_path / "runs.csv")], Columns(name="{arm}-s{seed}"))
    assert [(run.arm, run.seed, run.status, run.records) for run in found.runs] == [
        ("bf16", 0, "done", {"val/loss": {0: 3.25}}),
        ("nvfp4", 0, "failed", {"val/loss": {0: 3.5}}),
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"arm": "a", "seed": 0', "line 2 is not a JSON object"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"arm": "a", "arm": "b"}', "'arm' is there twice"),
        ('{"arm": "a", "val/loss": 1, "val": {"loss": 2}}', "'val/loss' is there twice"),
        ('{"arm": "a", "loss": 1, "loss ": 2}', "'loss' is there twice"),
        ('{"arm": "a", "seed": true, "step": 1, "loss": 1}', "not a whole number"),
        ('{"arm": "a", "seed": 0, "step": 1, "loss": "x"}', "not a number"),
        ('{"arm": "a", "seed": 0, "step": 1, "loss": 3}', "4.0 in line 1 and 3.0 in line 2"),
    ],
)
def test_a_line_of_json_that_cannot_be_read_is_refused(line, sentence, tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(f'{{"arm": "a", "seed": 0, "step": 1, "loss": 4}}\n{line}\n')
    with pytest.raises(InputError, match=sentence):
        read([str(path)])


def test_json_has_nan_and_infinities_and_a_list_is_read_as_lines_are(tmp_path):
    rows = [
        {"arm": "a", "seed": 0, "step": n, "loss": v} for n, v in enumerate([math.nan, math.inf, -math.inf])
    ]
    (tmp_path / "runs.json").write_text(json.dumps(rows))
    (run,) = read([str(tmp_path / "runs.json")]).runs
    assert [str(value) for value in run.records["train/loss"].values()] == ["nan", "inf", "-inf"]


def test_sentences_on_many_files_stand_there_once(tmp_path):
    _, said = foreign_files.result(written(tmp_path, "csv, a file a run"), tmp_path)
    assert len(said) == 2
    assert all("bf16-s0.csv and 3 more: " in sentence for sentence in said)


def test_an_unknown_kind_of_file_is_refused_with_the_kinds(tmp_path):
    (tmp_path / "run.log").write_text("hello\n")
    with pytest.raises(InputError, match="--logs") as refusal:
        read([str(tmp_path / "run.log")])
    assert all(source.title in str(refusal.value) for source in sources.SOURCES.values())


@pytest.mark.parametrize("logs", ["nanogpt", "hf", "regex:("])
def test_an_unknown_format_of_logs_is_refused(logs, tmp_path):
    (tmp_path / "run.log").write_text("hello\n")
    with pytest.raises(InputError, match="--logs"):
        read([str(tmp_path / "run.log")], logs=logs)


# --- MLflow ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["database", "folder"])
def store(request, tmp_path_factory):
    """Return the place of a store of MLflow with two experiments, written by MLflow's own client."""
    from mlflow import MlflowClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        folder = tmp_path_factory.mktemp("mlflow")
        place = folder / ("mlflow.db" if request.param == "database" else "mlruns")
        client = MlflowClient(f"sqlite:///{place}" if request.param == "database" else place.as_uri())
        for experiment in ("pilot", "main"):
            number = client.create_experiment(experiment)
            for arm, seed in (("bf16", 0), ("nvfp4", 0)):
                run = client.create_run(number, run_name=f"{arm}-s{seed}").info.run_id
                client.log_param(run, "recipe", arm)
                client.log_param(run, "seed", seed)
                for step, value in ((10, 3.0), (20, math.nan), (30, math.inf)):
                    client.log_metric(run, "eval_loss", value, step=step)
                client.log_metric(run, "epoch_time", 7.5, step=1)
                client.set_terminated(run, "FINISHED" if arm == "bf16" else "FAILED")
        client.create_run(number)
    return place


@pytest.mark.slow
def test_runs_of_mlflow_have_all_steps_params_and_status(store):
    found = read([f"{store}#main"])
    assert [(run.arm, run.seed, run.status) for run in found.runs] == [
        ("bf16", 0, "done"),
        ("nvfp4", 0, "failed"),
    ]
    for run in found.runs:
        assert {step: str(value) for step, value in run.records["val/loss"].items()} == {
            10: "3.0",
            20: "nan",
            30: "inf",
        }
        assert run.records["epoch_time"] == {1: 7.5}
    assert any("recipe" in sentence for sentence in found.said)
    assert any("1 runs without metrics" in sentence for sentence in found.said)


@pytest.mark.slow
def test_several_experiments_of_mlflow_are_listed(store):
    with pytest.raises(InputError, match=r"#NAME: .*(main, pilot|pilot, main)"):
        read([str(store)])
    with pytest.raises(InputError, match="'mian'; 'main' is the nearest"):
        read([f"{store}#mian"])
