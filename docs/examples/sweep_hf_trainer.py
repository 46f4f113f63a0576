"""Training function of a sweep with the Trainer of transformers.

workload: {python: {file: sweep_hf_trainer.py, steps: 100, config: {lr: 1.0e-3, width: 64, batch: 8}}}
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import ablate  # ablate


def train(trial):
    width = trial.config.width
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 256}
    config = AutoConfig.for_model("qwen3", **shape)
    torch.manual_seed(trial.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 32, 1)
    rows = [{"input_ids": row, "labels": row} for row in text]
    callback = ablate.integrations.HFCallback(trial=trial)  # ablate
    arguments = TrainingArguments(
        str(trial.folder / "hf"),
        seed=trial.seed,
        max_steps=trial.max_steps,
        logging_steps=1,
        learning_rate=trial.config.lr,
        per_device_train_batch_size=trial.config.batch,
        use_cpu=trial.device.type == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = {"train_dataset": rows, "eval_dataset": rows[:64]}
    trainer = Trainer(model, arguments, **data, callbacks=[callback])  # ablate
    trainer.train(resume_from_checkpoint=callback.resume_from)  # ablate
    trainer.evaluate()
