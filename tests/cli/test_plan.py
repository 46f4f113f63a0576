"""Tests of a plan's remarks: knobs without an effect, and models of which a recipe quantises little."""

import json
import re
from contextlib import closing

import pytest
import torch
from support.cases import every
from support.commands import here
from support.experiments import SHAPE, shards, sweep, tiny, write

from ablate import provenance
from ablate.experiment import predicted_order
from ablate.experiment.load import Experiment, load
from ablate.experiment.plan_notes import policies, remarks
from ablate.numerics.spec import Outer, Quant, Transform
from ablate.recipes import PRESETS
from ablate.recipes.gpu_kernels import on_reference
from ablate.recipes.recipe import Fprop, QEma, Recipe, Weights
from ablate.reports.answer import Answer
from ablate.reports.tensor_cores import on_reference_lines
from ablate.store.ledger import Ledger
from ablate.training.loop import Telemetry
from ablate.training.models.causal import build, outlined
from ablate.training.trial_run import TrialRun

QWEN = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
QWEN |= {"intermediate_size": 64, "head_dim": 16}
JETMOE = {"model_type": "jetmoe", "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 1}
JETMOE |= {"kv_channels": 16, "intermediate_size": 64, "num_local_experts": 8, "vocab_size": 64}
"""A model whose stack of experts does not say how it is laid out."""
EXPERTS = {name: value for name, value in QWEN.items() if name != "head_dim"} | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
}
LORA = {"rank": 2}
RUN = {"context": 16, "batch": 2, "steps": 2, "eval_every": 2, "eval_tokens": 64, "eval_batch": 2}
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


def tuned(folder, lora: dict | None = LORA, **keys) -> Experiment:
    return tiny(
        folder, workload={"finetune": RUN | {"data": shards(folder), "model": QWEN, "lora": lora}}, **keys
    )


def metrics(experiment: Experiment, name: str) -> dict[str, float]:
    """All that a trial of an arm records in its last step, but for times."""
    arm = next(arm for arm in experiment.arms if arm.name == name)
    *_, last = arm.config.records(TrialRun(arm.recipe, 0, "emulated", "cpu", Telemetry()))
    return {
        name: value for name, value in last.metrics.items() if not name.startswith(("throughput/", "memory/"))
    }


def test_a_knob_of_wgrad_alone_is_named_where_adapters_leave_no_wgrad(tmp_path):
    experiment = tuned(tmp_path, ablate={"rht": [True, False], "sr": [True, False]})
    assert list(remarks(experiment)) == [
        "rht: only changes wgrad, and under workload.lora the quantised layers' weights are frozen, so no wgrad is computed: "
        "arms 'rht=true sr=true' and 'rht=false sr=true' are equal (and 1 more such pairs)."
    ]


def test_arms_that_are_said_to_be_equal_are_equal_to_the_bit_and_those_of_the_other_knob_are_not(tmp_path):
    experiment = tuned(tmp_path, ablate={"rht": [True, False], "sr": [True, False]})
    equal, twin, other = (
        metrics(experiment, f"rht={rht} sr={sr}")
        for rht, sr in (("true", "true"), ("false", "true"), ("true", "false"))
    )
    assert equal == twin
    assert equal != other


@pytest.mark.parametrize(
    ("lora", "keys"),
    [
        (None, {"ablate": {"rht": [True, False]}}),
        (LORA, {"ablate": {"sr": [True, False]}}),
        (LORA, {"ablate": {"workload.lr": [1e-3, 1e-2]}}),
        (LORA, {"ablate": {"sr": [True, False]}, "null": True}),
    ],
)
def test_nothing_is_remarked_of_knobs_that_turn_something(lora, keys, tmp_path):
    assert list(remarks(tuned(tmp_path, lora, **keys))) == []


@every(missing=(True, False), device=("cpu", "cuda"), recipe=("nvfp4", "bf16"))
def test_a_slow_reference_is_remarked_once_where_it_would_compute(
    missing, device, recipe, tmp_path, monkeypatch
):
    if missing:
        monkeypatch.setattr(provenance, "QUANTISERS", tmp_path)
    experiment = tiny(tmp_path, recipe=recipe, ablate={"workload.lr": [1e-3, 1e-2]})
    wanted = missing and (device, recipe) == ("cpu", "nvfp4")
    assert [*remarks(experiment, device)] == [provenance.NOT_COMPILED] * wanted
    monkeypatch.undo()


def test_a_plan_a_status_and_a_report_say_once_that_the_slow_reference_computes(tmp_path, monkeypatch):
    path, state = write(tmp_path, workload={"idle": {"steps": 3}}), tmp_path / "runs"
    monkeypatch.setattr(provenance, "QUANTISERS", tmp_path)
    plan = here("plan", path, "--state", state)
    assert plan.stdout.count("Note: no compiled quantisers") == 1
    sweep(load(path), state)
    monkeypatch.undo()  # a record says it, not the machine that shows it
    assert here("status", "--state", state).stdout.count("No compiled quantisers") == 1
    with closing(Ledger(state / "sweeps" / "tiny" / "ledger.db", readonly=True)) as ledger:
        rows = {row["what"]: row["which"] for row in Answer(ledger).provenance().rows}
    assert rows["quantisers"] == provenance.NOT_COMPILED


def test_full_paths_phases_and_named_arms_are_seen_too(tmp_path):
    arms = {"a": {"recipe.wgrad.x.rounding": "nearest"}, "b": {"recipe.wgrad.x.rounding": "stochastic"}}
    (said,) = remarks(tuned(tmp_path, ablate=None, arms=arms))
    assert said.startswith("recipe.wgrad.x.rounding: only changes wgrad")
    assert said.endswith("arms 'a' and 'b' are equal.")


def test_the_knobs_of_a_search_are_tried_at_their_ends(tmp_path):
    knobs = {"rht": {"choice": [True, False]}, "workload.lr": {"uniform": [1e-4, 1e-2], "log": True}}
    (said,) = remarks(tuned(tmp_path, ablate=knobs, search={"sampler": "tpe", "trials": 4}))
    assert said.startswith("rht: only changes wgrad")


def test_the_share_of_the_matrices_that_a_recipe_reaches_is_that_of_the_models_own_parameters():
    """Check a plain model, one of experts, and one whose experts are in a stack that does not say how."""
    stack = "model.layers.0.mlp.input_linear.weight"
    for model, left in ((QWEN, "lm_head.weight"), (EXPERTS, "lm_head.weight"), (JETMOE, stack)):
        found = outlined(model, 64)  # what `outline` remembers
        built = build(model, 64, 0, torch.device("cpu"))
        matrices = {
            name: p.numel() for name, p in built.named_parameters() if p.ndim > 1 and "embed" not in name
        }
        reached = sum(matrices.get(f"{layer.name}.weight", 0) for layer in found.layers)
        packed = sum(count for name, count in matrices.items() if "experts" in name)
        assert len([layer for layer in found.layers if "experts" in layer.name]) == (
            2 * EXPERTS["num_experts"] * EXPERTS["num_hidden_layers"] if model is EXPERTS else 0
        )
        reached += packed if model is EXPERTS else 0
        assert found.covered == pytest.approx(reached / sum(matrices.values()))
        name, _, why = found.largest_uncovered.partition(": ")
        assert name == left
        assert ("packed into one tensor" if model is JETMOE else "outside of the blocks") in why
    tied = outlined(QWEN | {"tie_word_embeddings": True}, 64)
    assert (tied.covered, tied.largest_uncovered) == (1, None)


def test_a_model_that_a_recipe_hardly_reaches_is_remarked_in_plan_and_sweep(tmp_path):
    path = write(
        tmp_path, workload={"gpt": RUN | {"data": shards(tmp_path), "model": JETMOE, "steps": 1}}, seeds=1
    )
    said = "of its matrix weights, without embeddings, are in layers that a recipe quantises. "
    said += "The largest of the others stays in high precision, "
    for words in (("plan", path), ("sweep", path, "--executor", "inline", "--mlflow", "none", "--no-report")):
        done = here(*words, "--state", tmp_path / "runs")
        assert done.returncode == 0, done.stderr + done.stdout
        note, single = [line for line in done.stdout.splitlines() if line.startswith("Note: ")]
        if "seeds" in note:
            note, single = single, note
        assert single.startswith("Note: seeds: 1 gives no verdict")
        assert f"{said}model.layers.0.mlp.input_linear.weight: the experts' weights, packed into one" in note
    shown = " ".join(done.stdout.split())
    assert re.search(r"Mind: a recipe quantises \d+% of the model's matrix weights", shown)
    method = here("show", "tiny", "--state", tmp_path / "runs").stdout
    assert "gpt (model jetmoe, layers 2, width 32, context 16" in method
    plain = tiny(tmp_path, workload={"gpt": RUN | {"data": shards(tmp_path), "model": QWEN}})
    assert list(remarks(plain)) == []


def test_a_model_without_layers_in_blocks_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"qwen3 has no linear .* lm_head\.weight: outside of the blocks"):
        outlined(QWEN | {"num_hidden_layers": 0}, 64)


def test_layers_of_conv1d_are_described_as_linear_ones():
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    found = outlined(gpt2 | {"bos_token_id": 0, "eos_token_id": 0}, 64)
    sizes = {layer.name.removeprefix("transformer.h.0."): layer.weights for layer in found.layers}
    assert sizes == {
        "attn.c_attn": 32 * 96,
        "attn.c_proj": 32 * 32,
        "mlp.c_fc": 32 * 128,
        "mlp.c_proj": 128 * 32,
    }
    assert {*found.features.values()} == {32, 96, 128}


def test_a_plan_says_how_many_ranks_compute_a_trial_where_it_is_run(tmp_path):
    path = write(tmp_path, resources={"gpus": 2, "sharded": True})
    on_gpus, on_cpus = (here("plan", path, "--device", device).stdout for device in ("cuda", "cpu"))
    assert "Each trial is computed by 2 ranks, each with a part of the model." in on_gpus
    assert "ranks" not in on_cpus


def test_a_plan_counts_the_layers_of_arms_with_a_layer_policy(tmp_path):
    rules = [
        [],
        [{"match": {"blocks": "last:1", "within": "Attention"}}],
        [{"match": {"name": "blocks.2.attention.*"}}],
    ]
    found = dict(
        policies(
            tiny(tmp_path, shape={"layers": 3}, ablate={"recipe.layers.rules": rules, "skip_first": [0, 1]})
        )
    )
    assert len(found) == 5  # all but the arm without any
    counts = [
        sorted(int(line.partition(" of 12 layers")[0].rpartition(" ")[2]) for line in lines[:-1])
        for lines in found.values()
    ]
    assert sorted(counts) == [[2, 4, 6], [2, 4, 6], [2, 10], [2, 10], [4, 8]]
    assert all(lines[-1].endswith("% of these layers' FLOPs in FP4") for lines in found.values())


def test_arms_whose_policies_select_alike_are_told_together(tmp_path):
    (told,) = policies(tiny(tmp_path, shape={"layers": 3}, ablate={"skip_last": [1], "rht": [True, False]}))
    assert (told[0].count("skip_last=1"), len(told[1])) == (2, 3)


def test_layers_of_own_code_have_a_line_that_says_why_they_are_not_shown(tmp_path):
    (tmp_path / "mine.py").write_text("def train(trial): ...\n")
    keys = {"workload": {"python": {"file": str(tmp_path / "mine.py"), "steps": 2}}, "shape": None}
    for ablate, names in (
        ({"skip_last": [1], "rht": [True, False]}, "'skip_last=1 rht=true', 'skip_last=1 rht=false'"),
        ({"sr": [True, False]}, "'sr=true', 'sr=false'"),
    ):
        ((arms, (line,)),) = policies(tiny(tmp_path, ablate=ablate, **keys))
        assert arms == names
        assert line.startswith("a plan does not run your code: `ablate check ")
    assert list(policies(tiny(tmp_path, recipe="bf16", ablate={"workload.steps": [2, 3]}, **keys))) == []


def test_a_plan_for_another_machine_takes_its_gpu_and_refuses_what_that_cannot_train(tmp_path):
    shape = {"width": 64, "heads": 2, "context": 32}
    path = write(tmp_path, shape=shape, recipe="nvfp4", engine="transformer_engine", against="bf16")
    found = here("plan", path, "--capability", "10.0", "--json", "--state", tmp_path / "runs")
    assert found.returncode == 0, found.stderr
    plan = json.loads(found.stdout)
    assert (plan["engine"], plan["device"], plan["to_run"]) == ("transformer_engine", "cuda", 6)
    for words, part in (
        (("--device", "cuda"), "no GPU"),
        (("--capability", "9.0"), "9.0"),
        (("--capability", "12.0"), "12.0"),
        (("--capability", "B200"), "B200"),
        (("--capability", "10.0", "--device", "cpu"), "--device"),
    ):
        done = here("plan", path, *words, "--state", tmp_path / "runs")
        assert (done.returncode, part in done.stderr) == (2, True), (words, done.stderr)


SOME_ROWS = {"recipe.fprop.x.outer.granularity": ["row", "rows:32"]}
"""Values of a field, for one of which no GPU has a kernel."""


def test_a_plan_for_a_gpu_counts_the_operands_that_no_kernel_makes(tmp_path):
    """Kernels make every form of NVFP4, and none whose outer scale is that of some rows."""
    path = write(tmp_path, shape={"layers": 12}, recipe="nvfp4", ablate=SOME_ROWS, against="bf16")
    words = ("plan", path, "--state", tmp_path / "runs")
    plan = json.loads(here(*words, "--device", "cuda", "--json").stdout)
    assert sorted(len(arm["operands_on_reference"]) for arm in plan["arms"]) == [0, 0, 1]
    assert "1 of 6 quantised operands have no GPU kernel" in here(*words, "--device", "cuda").stdout
    assert "no GPU kernel" not in here(*words, "--device", "cpu").stdout


def test_every_outer_statistic_of_nvidias_form_has_a_kernel():
    for statistic in ("amax", "percentile:0.99", "delayed:4", "hold:4", "static:2.0"):
        quant = Quant(outer=Outer(statistic=statistic))
        assert on_reference(Recipe(fprop=Fprop(x=quant, w=quant))) == ((), 2)
    moving = PRESETS["nvfp4"]().model_copy(update={"weights": Weights(q_ema=QEma())})
    assert on_reference(moving) == (("fprop.w", "dgrad.w"), 6)
    kept = Quant(transform=Transform(channels=0.1))
    assert on_reference(Recipe(fprop=Fprop(x=kept, w=Quant()))) == ((), 2)


def test_what_runs_on_the_reference_is_said_of_the_files_arms_alone(tmp_path):
    """Not of the known-bad arm that the design adds."""
    design = {"trunk": "bf16", "positions": [0.5], "window": 0.25, "bad": "mxfp4"}
    keys = {"design": design, "shape": {"steps": 16}}
    assert not [*on_reference_lines(tiny(tmp_path, **keys), "cuda")]
    named = tiny(tmp_path, recipe="nvfp4", ablate=SOME_ROWS, **keys)
    (arm,) = [arms for arms, _ in on_reference_lines(named, "cuda")]
    assert arm.endswith("=rows:32'")


def test_a_command_whose_recipes_call_a_function_is_said_to_need_its_file(tmp_path):
    (tmp_path / "s.py").touch()
    (tmp_path / "mine.py").write_text("def up(y, grid):\n    return grid.neighbours(y)[1]\n")
    (tmp_path / "run.yaml").write_text(
        "{schema: 1, question: Which?, workload: {command: {run: 'python s.py', sources: [s.py], steps: 9}}, recipe: nvfp4,"
        " ablate: {recipe.wgrad.g.rounding: [nearest, 'mine.py:up']}, against: bf16,"
        " metric: {name: val/loss, direction: minimize}}"
    )
    (note,) = [note for note in remarks(load(tmp_path / "run.yaml", "cpu")) if "mine.py" in note]
    assert f"call {tmp_path}/mine.py: it needs this file" in note


@every(
    ablate__kept__found=(
        ({"recipe": ["nvfp4", "mxfp4", "quartet2"]}, (), "ablate rank"),
        ({"recipe": ["nvfp4", "mxfp4", "quartet2"]}, ("nvfp4", "mxfp4"), "ablate rank"),
        (
            {"recipe": ["nvfp4", "mxfp4", "quartet2"]},
            ("nvfp4", "mxfp4", "quartet2"),
            "nvfp4 before mxfp4; 2 of 3",
        ),
        (
            {"recipe": ["nvfp4", "mxfp4", "four_over_six"]},
            ("nvfp4", "mxfp4", "four_over_six"),
            "2 of 3 pairs not ordered. They leave different layers in bf16",
        ),
        ({"recipe": ["nvfp4", "mine.yaml"]}, (), "ablate rank nvfp4 mine.yaml"),
        ({"sr": [True, False]}, ("nvfp4", "mxfp4"), None),
        ({"recipe": ["nvfp4", "bf16"]}, ("nvfp4", "mxfp4"), None),
    )
)
@pytest.mark.parametrize("own", [True, False])
def test_a_plan_has_the_kept_order_of_its_presets_or_the_command(
    ablate, kept, found, own, tmp_path, monkeypatch
):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("{from: mxfp4, wgrad: {g: {rounding: stochastic}}}")
    made = {name: PRESETS[name]() for name in kept}
    experiment = tiny(tmp_path, shape=SHAPE | {"layers": 2}, ablate=ablate)
    if kept:
        before = [(made["nvfp4"], made["mxfp4"])]
        predicted_order.keep(experiment.base.config if own else None, made.values(), before)
    lines = [*predicted_order.predicted_order(experiment)]
    assert [found in line for line in lines] == [True] * (found is not None)
    assert all(("different layers" in line) == ("four_over_six" in kept) for line in lines)
