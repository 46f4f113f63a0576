"""Train with the Trainer of transformers. `# ablate` marks all that a recipe adds to it.

python hf_trainer.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import ablate  # ablate

TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}


def loss_of(outputs, labels, num_items_in_batch=None):
    """Labels are the next tokens, already shifted."""
    return F.cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten())


def trainer(model, rows, folder, recipe="nvfp4", seed=0, callback=None, loss=loss_of, **more) -> Trainer:
    callback = callback or ablate.integrations.HFCallback(recipe, seed=seed)  # ablate
    evaluated = more.pop("eval_dataset", None)
    defaults = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    defaults |= {"adam_beta2": 0.95, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    return Trainer(
        model,
        TrainingArguments(str(folder), seed=seed, disable_tqdm=True, **(defaults | more)),
        train_dataset=rows,
        eval_dataset=evaluated,
        compute_loss_func=loss,
        callbacks=[callback],  # ablate
    )


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


if __name__ == "__main__":
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 65, 1)
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in text]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **TINY), dtype=torch.float32)
    trained = trainer(model, rows, sys.argv[1], max_steps=50, per_device_train_batch_size=8)
    trained.train()
    print(*losses(trained), sep="\n")
