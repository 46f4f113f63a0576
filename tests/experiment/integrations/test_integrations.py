"""Recipes in loops of other people: the same numbers as the project's own loop, and as without an interruption.

Each example of docs/examples/ is run here at its smallest size.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import warnings
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from support.experiments import shards
from torch import nn

import ablate
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.experiment.load import load
from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Recipe
from ablate.training.loop import Telemetry
from ablate.training.models import hidden_if_broken
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.finetune import Finetune
from ablate.training.workloads.python import Python
from ablate.verification.workload_checks import Runs, promises

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
NEVER = Telemetry(every=10**9, shadow=10**9, log=1)
STEPS, HALF, BATCH, CONTEXT, LR = 4, 2, 2, 16, 1e-2
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def example(name: str):
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with hidden_if_broken("transformer_engine"):
        spec.loader.exec_module(module)
    return module


def test_packed_experts_of_ones_own_are_converted_and_train(capsys):
    module = example("own_experts")
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"blocks": nn.ModuleList([module.Block(), module.Block()])}), torch.randn(64, 32)
    losses = module.train(model, x, x.roll(1, 0), 5)
    assert losses[-1] < losses[0] / 2
    assert capsys.readouterr().out.startswith("4 stacks of 4 experts converted, 99.5% of the weights")
    assert {name for name, _ in model.named_modules()} >= {
        "blocks.0.experts.3.gate_up",
        "blocks.1.experts.0.down",
    }


class Subject:
    """The built-in workload: its model, data and numbers."""

    def __init__(self, folder: Path, recipe: str = "nvfp4", accumulate: int = 1, seed: int = 3) -> None:
        self.recipe, self.seed, self.accumulate = PRESETS[recipe](), seed, accumulate
        self.config = Finetune(
            data=shards(folder),
            model=QWEN3,
            steps=STEPS,
            batch=BATCH,
            context=CONTEXT,
            lr=LR,
            warmup=0.0,
            decay="none",
            accumulate=accumulate,
            eval_every=STEPS,
            eval_tokens=64,
            eval_batch=2,
        )

    def model(self) -> nn.Module:
        return self.config.subject(self.recipe, Clock(self.seed), torch.device("cpu")).model

    @cached_property
    def batch(self):
        return self.config.windows(self.seed, torch.device("cpu"))[0]

    def rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the rows of all batches, in their order."""
        batches = [self.batch(step, micro) for step in range(STEPS) for micro in range(self.accumulate)]
        return [(tokens[n], targets[n]) for tokens, targets in batches for n in range(BATCH)]

    def expected(self) -> tuple[list[float], nn.Module]:
        """Return the losses and the trained model of the project's own loop, which must not be changed."""
        return trained_here(self.recipe, self.seed, self.accumulate)


@cache
def trained_here(recipe: Recipe, seed: int, accumulate: int) -> tuple[list[float], nn.Module]:
    """Train once for all tests that compare with the project's own loop; the data are the same in every folder."""
    with tempfile.TemporaryDirectory() as folder:
        config = Subject(Path(folder), accumulate=accumulate).config
        ready = config.prepare(recipe, seed, "cpu")
        losses = [record.metrics["train/loss"] for record in config.train(ready, NEVER)]
        return losses, ready.model


def same_parameters(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def plain(model: nn.Module) -> bool:
    return not any(isinstance(module, EmulatedLinear) for module in model.modules())


@pytest.fixture(params=[1, 2], ids=["one", "accumulated"])
def subject(request, tmp_path) -> Subject:
    return Subject(tmp_path, accumulate=request.param)


# --- a loop of one's own ----------------------------------------------------------------------------


def test_a_foreign_loop_gives_the_numbers_of_the_built_in_workload(subject):
    expected, trained = subject.expected()
    model = subject.model()
    losses = example("own_loop").train(
        model, subject.batch, STEPS, subject.recipe, subject.seed, subject.accumulate, LR
    )
    assert losses == expected
    assert same_parameters(model, trained)


def test_a_foreign_loop_continues_bit_for_bit(subject, tmp_path):
    expected, trained = subject.expected()
    own_loop, model, fresh, path = example("own_loop"), subject.model(), subject.model(), tmp_path / "half.pt"
    arguments = (subject.batch, STEPS, subject.recipe, subject.seed, subject.accumulate, LR, path)
    assert own_loop.train(model, *arguments, until=HALF) + own_loop.train(fresh, *arguments) == expected
    assert same_parameters(fresh, trained)


def test_an_own_model_and_loop_runs():
    losses = example("nanogpt_like").main(steps=3, context=16)
    assert losses == example("nanogpt_like").main(steps=3, context=16)
    assert losses != example("nanogpt_like").main(steps=3, context=16, recipe="bf16")


# --- the Trainer of transformers --------------------------------------------------------------------


def dictionaries(subject: Subject) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens, "labels": targets} for tokens, targets in subject.rows()]


def hf_trainer(subject: Subject, model: nn.Module, folder: Path, **arguments):
    module = example("hf_trainer")

    def loss(outputs, labels, num_items_in_batch=None):
        return module.loss_of(outputs, labels) / subject.accumulate

    sizes = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": LR,
        "use_cpu": True,
        "gradient_accumulation_steps": subject.accumulate,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
    }
    recipe = arguments.pop("recipe", subject.recipe)
    return module.trainer(
        model,
        dictionaries(subject),
        folder,
        recipe,
        subject.seed,
        arguments.pop("callback", None),
        loss,
        **(sizes | arguments),
    )


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_hf_trainer_gives_the_numbers_of_the_built_in_workload(subject, tmp_path):
    expected, trained = subject.expected()
    model = subject.model()
    trainer = hf_trainer(subject, model, tmp_path / "hf")
    trainer.train()
    assert same_parameters(model, trained)
    # The Trainer adds the losses of micro-batches in fp32.
    assert losses_of(trainer) == (expected if subject.accumulate == 1 else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_the_hf_trainer_continues_bit_for_bit(recipe, tmp_path):
    subject = Subject(tmp_path, recipe, accumulate=2)
    whole, fresh = subject.model(), subject.model()
    often = {"save_strategy": "steps", "save_steps": HALF}
    uninterrupted = hf_trainer(subject, whole, tmp_path / "whole", **often)
    uninterrupted.train()
    half = str(tmp_path / "whole" / f"checkpoint-{HALF}")
    continued = hf_trainer(subject, fresh, tmp_path / "other", **often)
    continued.train(resume_from_checkpoint=half)
    assert losses_of(continued) == losses_of(uninterrupted)
    assert same_parameters(fresh, whole)
    assert callback_of(continued).run.steps_done == STEPS
    with pytest.raises(ValueError, match="of another recipe"):
        hf_trainer(subject, subject.model(), tmp_path / "x", recipe="mxfp8").train(
            resume_from_checkpoint=half
        )


def test_a_checkpoint_of_another_training_begins_a_recipe_at_its_step(tmp_path):
    subject = Subject(tmp_path)
    trainer = hf_trainer(subject, subject.model(), tmp_path / "plain", save_strategy="steps", save_steps=HALF)
    trainer.remove_callback(callback_of(trainer))
    trainer.train()
    continued = hf_trainer(subject, subject.model(), tmp_path / "continued")
    with pytest.warns(UserWarning, match="no state of a recipe: the recipe begins at that step"):
        continued.train(resume_from_checkpoint=str(tmp_path / "plain" / f"checkpoint-{HALF}"))
    assert losses_of(continued)[:HALF] == losses_of(trainer)[:HALF]
    assert losses_of(continued)[HALF + 1 :] != losses_of(trainer)[HALF + 1 :]
    assert callback_of(continued).run.steps_done == STEPS


@pytest.mark.parametrize("preset", ["nvfp4", "fp8_delayed"])
def test_evaluation_between_the_steps_of_the_hf_trainer_changes_no_bit(preset, tmp_path):
    subject = Subject(tmp_path, preset)
    expected, trained = subject.expected()
    model, callback = subject.model(), hf_callback(recipe=subject.recipe, seed=subject.seed)
    evaluated = dictionaries(subject)[:4]
    trainer = hf_trainer(
        subject,
        model,
        tmp_path / "hf",
        callback=callback,
        eval_dataset=evaluated,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert losses_of(trainer) == expected
    assert same_parameters(model, trained)
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(found) == 1 + STEPS // 2
    assert found[0] != before  # converted since
    after = trainer.evaluate()["eval_loss"]
    assert after == found[-1]
    model.model.layers[0].mlp.up_proj.weight.data.mul_(
        2
    )  # leaves the version, by which casts are kept, as it is
    assert trainer.evaluate()["eval_loss"] != after  # no cast of the weights before is kept


def callback_of(trainer):
    (callback,) = (c for c in trainer.callback_handler.callbacks if type(c).__name__ == "HFCallback")
    return callback


def hf_callback(**arguments):
    with hidden_if_broken("transformer_engine"):
        return ablate.integrations.HFCallback(**arguments)


def test_the_hf_trainer_restores_the_model_and_may_train_again(tmp_path):
    subject = Subject(tmp_path)
    model, callback = subject.model(), hf_callback(recipe="nvfp4", seed=subject.seed, restore=True)
    trainer = hf_trainer(subject, model, tmp_path / "hf", callback=callback)
    trainer.train()
    assert plain(model)
    tokens = subject.rows()[0][0][None]
    same = subject.model()
    same.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, same(input_ids=tokens).logits)
    callback.restore = False
    trainer.train()
    trainer.train()  # a conversion is followed by another
    assert callback.run.steps_done == STEPS


def test_the_hf_trainer_logs_metrics_and_alarms_for_its_reporters_too(tmp_path):
    subject, reported = Subject(tmp_path), []
    callback = hf_callback(recipe="nvfp4", measure_every=2)
    with hidden_if_broken("transformer_engine"):
        from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            reported.append(dict(logs))

    trainer = hf_trainer(subject, subject.model(), tmp_path / "hf", callback=Reporter())
    callback.attach(trainer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    for logs in (reported[0], steps[0]):
        assert logs["quant/fprop.x/sqnr_db"] > 10
        assert logs["flops/fp4_share"] == 1.0
        assert logs["alarms"] >= 0
    assert reported[0]["quant/fprop.x/sqnr_db"] == reported[1]["quant/fprop.x/sqnr_db"]
    assert reported[1]["quant/fprop.x/sqnr_db"] != reported[2]["quant/fprop.x/sqnr_db"]
    assert not [name for name in reported[0] if "layers.0" in name]
    json.dumps(trainer.state.log_history)


def test_a_script_with_the_hf_trainer_ends_without_a_message(tmp_path):
    """Between steps an evaluation is open, and the Trainer of a script lives until the interpreter ends."""
    text, script = (EXAMPLES / "hf_trainer.py").read_text(), tmp_path / "hf_trainer.py"
    assert "max_steps=50" in text
    script.write_text(text.replace("max_steps=50", "max_steps=12"))
    code = (
        f"import runpy, sys; sys.argv[1:] = [{str(tmp_path)!r}]\n"
        "from ablate.training.models import hidden_if_broken\n"
        "with hidden_if_broken('transformer_engine'):\n"
        f"    kept = runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert "Exception ignored" not in result.stderr
    losses = [float(line) for line in result.stdout.splitlines()[-12:]]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1


def test_what_the_hf_trainer_cannot_do_is_refused(tmp_path):
    subject = Subject(tmp_path)
    with pytest.raises(ValueError, match=r"no preset|no such preset|nvfp5"):
        hf_callback(recipe="nvfp5")
    with pytest.raises(ValueError, match="restore_callback_states_from_checkpoint"):
        hf_trainer(
            subject,
            subject.model(),
            tmp_path,
            restore_callback_states_from_checkpoint=True,
            callback=hf_callback(filter=lambda name, linear: True),
        )


def test_callbacks_that_the_trainer_makes_anew_continue_too(tmp_path):
    subject = Subject(tmp_path)
    trainer = hf_trainer(subject, subject.model(), tmp_path / "hf", save_strategy="steps", save_steps=HALF)
    trainer.train()
    continued = hf_trainer(
        subject, subject.model(), tmp_path / "x", restore_callback_states_from_checkpoint=True, recipe="mxfp8"
    )
    continued.train(resume_from_checkpoint=str(tmp_path / "hf" / f"checkpoint-{HALF}"))
    assert losses_of(continued) == losses_of(trainer)


# --- the Trainer of transformers in a sweep ---------------------------------------------------------


def sweep_workload(tmp_path: Path, *edits: tuple[str, str]) -> Python:
    text = (EXAMPLES / "sweep_hf_trainer.py").read_text()
    for old, new in (("rows[:64]", "rows[:16]"), *edits):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "train.py").write_text(text)
    return Python(file=str(tmp_path / "train.py"), steps=4, config={"lr": 1e-2, "width": 32, "batch": 2})


def test_a_training_function_with_the_hf_trainer_keeps_the_promises_of_a_workload(tmp_path):
    workload = sweep_workload(tmp_path)
    with hidden_if_broken("transformer_engine"):
        runs = Runs(workload)
        found = list(promises(runs))
        last = runs.records()[-1]
    assert [promise for promise in found if not promise.kept] == []
    assert len(found) == 7
    assert last.step == 4
    assert {"train/loss", "val/loss", "grad/norm", "train/lr"} <= last.metrics.keys()
    assert not [name for name in last.metrics if "runtime" in name or "per_second" in name]


def test_the_experiment_of_the_tutorial_keeps_the_promises_of_a_workload():
    experiment = load(EXAMPLES / "nanogpt.yaml", device="cpu")
    small = experiment.base.config.model_copy(update={"steps": 4})
    found = list(promises(Runs(small)))
    assert [promise for promise in found if not promise.kept] == []
    assert len(found) == 7
    assert {arm.name for arm in experiment.arms} > {"bf16 config.width=64", "sr=true config.width=128"}


def test_a_loss_that_is_not_finite_ends_the_trial_though_the_trainer_would_hide_it(tmp_path):
    edit = ("    text = ", "    torch.nn.init.constant_(model.lm_head.weight, float('nan'))\n    text = ")
    workload = sweep_workload(tmp_path, edit)
    with hidden_if_broken("transformer_engine"):
        records = list(workload.records(TrialRun(PRESETS["nvfp4"](), 0, "emulated", "cpu", NEVER)))
    assert [record.step for record in records] == [1]
    assert records[0].metrics["nan/first_step"] == 1


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (("        seed=trial.seed,\n", ""), r"seed=42 \(here 0\)"),
        (("max_steps=trial.max_steps", "max_steps=3"), r"max_steps=3 \(here 4\)"),
    ],
)
def test_arguments_that_contradict_the_trial_are_refused(edit, sentence, tmp_path):
    workload = sweep_workload(tmp_path, edit)
    with hidden_if_broken("transformer_engine"), pytest.raises(ValueError, match=sentence):
        list(workload.records(TrialRun(PRESETS["nvfp4"](), 0, "emulated", "cpu", NEVER)))


def test_a_trial_that_forgets_to_continue_is_refused(tmp_path):
    workload = sweep_workload(tmp_path, ("resume_from_checkpoint=callback.resume_from", ""))
    with hidden_if_broken("transformer_engine"):
        assert [p.name for p in promises(Runs(workload)) if not p.kept] == ["it resumes bit for bit"]


# --- Lightning --------------------------------------------------------------------------------------


def lightning_rows() -> list[torch.Tensor]:
    return list(torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0)))


def lightning_module(seed: int = 0):
    pytest.importorskip("lightning")
    module = example("lightning_module")
    torch.manual_seed(seed)
    return module, module.NextByte(width=16, depth=2)


def test_lightning_gives_the_numbers_of_a_loop_of_ones_own(tmp_path):
    example_module, module = lightning_module()
    trainer = example_module.fit(
        module,
        lightning_rows(),
        2,
        seed=5,
        validation=lightning_rows()[:2],
        accumulate_grad_batches=2,
        max_epochs=2,
        val_check_interval=1,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    assert trainer.global_step == 4
    _, own = lightning_module()
    run = ablate.convert(own, "nvfp4", seed=5, steps=4)
    optimizer, batches = own.configure_optimizers(), torch.stack(lightning_rows()).split(2)
    for step in range(4):
        with run.step():
            for micro_batch in range(2):
                (own.training_step(batches[step % 2 * 2 + micro_batch], 0) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert module.losses == own.losses
    assert same_parameters(module, own)
    (callback,) = (c for c in trainer.callbacks if type(c).__name__ == "LightningCallback")
    assert callback.run.steps_done == 4
    assert trainer.validate(module, torch.utils.data.DataLoader(lightning_rows(), 2), verbose=False)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_lightning_continues_bit_for_bit(recipe, tmp_path):
    fit, whole = lightning_module()[0].fit, lightning_module()[1]
    arguments = {"recipe": recipe, "default_root_dir": tmp_path}
    fit(whole, lightning_rows(), 2, max_epochs=2, enable_checkpointing=False, **arguments)
    half = fit(lightning_module()[1], lightning_rows(), 2, max_epochs=1, **arguments)
    fresh = lightning_module(seed=1)[1]
    path = half.checkpoint_callback.best_model_path
    fit(fresh, lightning_rows(), 2, max_epochs=2, enable_checkpointing=False, checkpoint=path, **arguments)
    assert fresh.losses == whole.losses[4:]
    assert same_parameters(fresh, whole)


def test_lightning_logs_metrics_and_restores_the_model(tmp_path):
    _, module = lightning_module()
    from lightning.pytorch import Trainer

    callback = ablate.integrations.LightningCallback("nvfp4", restore=True)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        max_steps=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader(lightning_rows(), 2))
    assert trainer.callback_metrics["quant/fprop.x/sqnr_db"] > 10
    assert plain(module)
    with pytest.raises(ValueError, match="the recipe has rules for weights"):
        ablate.integrations.LightningCallback({"from": "nvfp4", "weights": {"q_ema": {"start": 1}}})


class Saved(dict[str, int]):
    """Steps of the recipe's state in checkpoints, by the moment at which they were saved."""

    def save(self, moment: str, trainer, path: Path) -> None:
        trainer.save_checkpoint(path)
        (state,) = torch.load(path, weights_only=True)["callbacks"].values()
        self[moment] = state["steps_done"]


def test_lightning_saves_the_steps_done_at_any_moment(tmp_path):
    _, module = lightning_module()
    from lightning.pytorch import Callback, Trainer

    saved, path = Saved(), tmp_path / "saved.ckpt"

    class First(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            saved.save(f"batch {batch_idx}", trainer, path)

        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                saved.save("validation", trainer, path)

    batches = torch.utils.data.DataLoader(lightning_rows(), 2)

    def trainer(*callbacks, **arguments):
        return Trainer(
            **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1},
            **{"enable_checkpointing": False, "enable_model_summary": False, "default_root_dir": tmp_path},
            **arguments,
            callbacks=[*callbacks],
        )

    callback = ablate.integrations.LightningCallback("nvfp4", restore=True)
    whole = trainer(First(), callback, accumulate_grad_batches=2, val_check_interval=3)
    whole.fit(module, batches, batches)
    saved.save("after", whole, path)
    assert saved == {"batch 0": 0, "batch 1": 1, "batch 2": 1, "validation": 1, "batch 3": 2, "after": 2}
    callback = ablate.integrations.LightningCallback("nvfp4")
    anew = trainer(callback)
    anew.validate(module, batches, ckpt_path=path, verbose=False)
    anew.fit(module, batches)  # from the weights alone
    assert callback.run.steps_done == anew.global_step == 4
    anew.fit_loop.max_epochs = 2
    with pytest.warns(UserWarning, match="step 4 continues without a state of a recipe"):
        anew.fit(module, batches)
    assert callback.run.steps_done == anew.global_step == 8


# --- accelerate -------------------------------------------------------------------------------------


def accelerated(subject: Subject, model: nn.Module, **arguments) -> list[float]:
    return example("accelerate_loop").train(
        model, subject.rows(), BATCH, subject.recipe, subject.seed, subject.accumulate, LR, **arguments
    )


def per_step(losses: list[float], accumulate: int) -> list[float]:
    return [sum(losses[n : n + accumulate]) / accumulate for n in range(0, len(losses), accumulate)]


def test_accelerate_gives_the_numbers_of_the_built_in_workload(subject):
    expected, trained = subject.expected()
    model = subject.model()
    assert per_step(accelerated(subject, model), subject.accumulate) == expected
    assert same_parameters(model, trained)


def test_accelerate_continues_bit_for_bit(subject, tmp_path):
    expected, trained = subject.expected()
    model, fresh, folder = subject.model(), subject.model(), tmp_path / "state"
    half = accelerated(subject, model, folder=folder, until=HALF * subject.accumulate)
    assert per_step(half + accelerated(subject, fresh, folder=folder), subject.accumulate) == expected
    assert same_parameters(fresh, trained)


def test_a_step_of_accelerate_that_fails_does_not_count(tmp_path):
    from accelerate import Accelerator

    subject = Subject(tmp_path)
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), subject.model()
    run = ablate.integrations.Accelerated(accelerator, model, "nvfp4")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = subject.rows()[0][0][None]
    with pytest.raises(KeyError), run.accumulate(model):
        _ = model(input_ids=tokens).logits.mean() * {}["data"]
    assert run.run.steps_done == 0
    with pytest.raises(RuntimeError, match="no step"):
        model(input_ids=tokens)
    with run.evaluation(), torch.no_grad():
        model(input_ids=tokens)
    done = []
    for _ in range(3):
        with run.accumulate(model):
            accelerator.backward(model(input_ids=tokens).logits.sum())
            optimizer.step()
            optimizer.zero_grad()
        done.append(run.run.steps_done)
    assert done == [1, 1, 2]  # accelerate counts the batch that failed, and steps after the next one


# --- what a recipe adds to a loop -------------------------------------------------------------------


CONVERTED = [path for path in sorted(EXAMPLES.glob("*.py")) if "\nimport ablate" in path.read_text()]
"""Loops that stay their user's own; a training function of a sweep is called by it, and imports nothing."""


@pytest.mark.parametrize("path", CONVERTED, ids=lambda path: path.stem)
def test_an_example_is_short_and_a_recipe_adds_at_most_five_lines_to_it(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 60
    marked = [line for line in lines if line.endswith("# ablate")]
    assert 1 < len(marked) <= 5
    assert [
        line for line in lines if "ablate" in line and line not in marked and "`# ablate`" not in line
    ] == []


def test_all_the_weights_of_qwen3s_blocks_are_reached(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = ablate.convert(Subject(tmp_path).model(), "nvfp4")
    assert not caught
    assert {row.name for row in run.layers if not row.converted} == {"lm_head"}
    assert sum(row.converted for row in run.layers) == 14


def test_a_class_that_needs_a_library_is_imported_at_its_first_use():
    code = (
        "import sys; sys.modules['lightning'] = None; import ablate; ablate.integrations\n"
        "print(*[name for name in ('torch', 'transformers', 'accelerate') if name in sys.modules])\n"
        "try: ablate.integrations.LightningCallback\n"
        "except ImportError as error: print(error)\n"
        "try: ablate.integrations.Nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [
        "",
        "LightningCallback needs lightning, which is not installed: pip install 'ablate-fp4[lightning]'",
        "module 'ablate.experiment.integrations' has no attribute 'Nothing'",
    ]
