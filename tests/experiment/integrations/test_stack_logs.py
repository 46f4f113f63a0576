"""Logs of stacks that are run here, read again: what the stack itself counted is the oracle of the reader."""

import contextlib
import io
import json

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from ablate.training.log_readers import open_reader
from ablate.training.log_readers.hf import state_records
from ablate.training.log_readers.lines import Unreadable
from ablate.training.models import hidden_if_broken

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a line by the Trainer of transformers; return what it printed, and its trainer_state.json."""
    with hidden_if_broken("transformer_engine"):
        from transformers import PrinterCallback, Trainer, TrainingArguments

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([2.0]))

        def forward(self, x, labels):
            return {"loss": ((self.weight * x - labels) ** 2).mean(), "logits": x}

    folder = tmp_path_factory.mktemp("trained")
    data = [{"x": torch.tensor([i / 16]), "labels": torch.tensor([i / 8 + 1])} for i in range(28)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=20,
        per_device_train_batch_size=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=20,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = Trainer(Line(), arguments, train_dataset=data, eval_dataset=data)
        assert any(isinstance(callback, PrinterCallback) for callback in trainer.callback_handler.callbacks)
        trainer.train()
    return printed.getvalue().splitlines(), (folder / "checkpoint-20/trainer_state.json").read_text()


def by_step(records):
    """Return value by metric and step."""
    return {(name, one.step): value for one in records for name, value in one.metrics.items()}


def test_the_trainers_state_has_steps_and_all_digits(trained):
    _, state = trained
    found = by_step(state_records(state))
    history = json.loads(state)["log_history"]
    for entry, key, name in (
        (entry, key, name)
        for entry in history
        for key, name in (("loss", "train/loss"), ("eval_loss", "val/loss"), ("grad_norm", "grad/norm"))
        if key in entry
    ):
        assert found.pop((name, entry["step"])) == entry[key]
    assert {name for name, _ in found} == {"train/lr"}
    assert len(found) == 10


def test_the_trainers_dicts_have_the_steps_of_its_state(trained):
    lines, state = trained
    reader = open_reader({"hf": 2})
    found = by_step([record for line in lines if (record := reader(line))])
    expected = by_step(state_records(state))
    assert found.keys() == expected.keys()
    assert {step for name, step in found if name == "val/loss"} == {5, 10, 15, 20}
    assert all(value == pytest.approx(expected[key], rel=1e-3) for key, value in found.items())


def test_dicts_that_a_resumed_run_prints_are_refused(trained):
    lines, _ = trained
    reader = open_reader({"hf": 2})
    later = [line for line in lines if "'loss'" in line][3:]
    assert reader(later[0]).step == 2
    with pytest.raises(Unreadable, match="about step"):
        reader(later[1])


def test_lightnings_rows_are_those_of_steps_done(tmp_path):
    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            loss = ((self.layer(batch[0]) - 1) ** 2).mean()
            self.log_dict({"train_loss": loss, "done": self.trainer.global_step + 1.0})
            return loss

        def validation_step(self, batch, _):
            self.log_dict(
                {"val_loss": self.layer(batch[0]).mean(), "done_before": float(self.trainer.global_step)}
            )

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 1)))
    logger = CSVLogger(tmp_path)
    trainer = lightning.Trainer(
        max_epochs=2,
        logger=logger,
        accelerator="cpu",
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), loader, loader)
    lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    reader = open_reader("lightning")
    records = [record for line in lines if (record := reader(line))]
    done = {record.step for record in records if record.metrics.get("done") == record.step}
    evaluated = {record.step for record in records if record.metrics.get("done_before") == record.step}
    assert done == {2, 4, 6, 8, 10, 12}
    assert evaluated == {6, 12}
    assert len(records) == len(done) + len(evaluated)
    assert {"train/loss", "val/loss"} <= {name for record in records for name in record.metrics}
