"""Fine-tuning models of transformers, and pretraining them: real module names, adapters over quantised layers, what is saved loads."""

import math
import shutil
import time
from itertools import count

import pytest
import torch
from support.experiments import shards
from support.gpt_runs import UNMEASURED

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.errors import InputError
from ablate.execution.messages import Events
from ablate.execution.supervisor import SilenceTimer
from ablate.experiment.load import load
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Layers, Rule, Run
from ablate.training.checkpoints import Checkpoints
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.finetune import Base, Finetune, Lora
from ablate.training.workloads.gpt import Gpt

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
NVFP4 = PRESETS["nvfp4"]()
OFTEN = Telemetry(every=2, shadow=2, log=1, checkpoint=0)
OWN = ("throughput/", "memory/")
SHARED = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
}
MODELS = {kind: {"model_type": kind, "head_dim": 16, **SHARED} for kind in ("qwen3", "llama")}
MODELS["gpt2"] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
MODELS["gpt2"] |= {"bos_token_id": 0, "eos_token_id": 0}
FIELDS = {
    "steps": 4,
    "batch": 2,
    "context": 16,
    "eval_every": 4,
    "eval_tokens": 64,
    "eval_batch": 2,
    "lr": 1e-2,
}


def tune(folder, kind: str = "qwen3", **fields) -> Finetune:
    return Finetune(**(FIELDS | {"data": shards(folder), "model": MODELS[kind]} | fields))


def metrics(records) -> list:
    return [(r.step, {k: v for k, v in sorted(r.metrics.items()) if not k.startswith(OWN)}) for r in records]


def run(workload, recipe=NVFP4, seed: int = 0, checkpoints=None, telemetry=UNMEASURED) -> list:
    return metrics(workload.records(TrialRun(recipe, seed, "emulated", "cpu", telemetry, checkpoints)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), [("qwen3", None), ("llama", Lora(rank=2, dropout=0.1))])
def test_it_trains_repeats_itself_and_resumes_bit_for_bit(kind, lora, tmp_path):
    """Whole models and adapters; adapters of qwen3 keep the contract of all workloads."""
    workload = tune(tmp_path, kind, lora=lora)
    first = run(workload, telemetry=OFTEN)
    assert first[-1][1]["val/perplexity"] == pytest.approx(math.exp(first[-1][1]["val/loss"]))
    assert {"quant/fprop.x/sqnr_db", "grad/cosine_to_bf16"} <= set(first[0][1])
    assert run(workload, telemetry=OFTEN) == first
    assert run(workload, seed=1, telemetry=OFTEN) != first
    begun = workload.records(
        TrialRun(NVFP4, 0, "emulated", "cpu", OFTEN, Checkpoints(tmp_path / "c.pt", "trial", 0))
    )
    taken = [next(begun) for _ in range(3)]
    begun.close()
    again = Checkpoints(tmp_path / "c.pt", "trial", 0)
    assert metrics(taken[:2]) + run(workload, checkpoints=again, telemetry=OFTEN) == first
    assert again.resumed == 2


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_recipe_changes_no_name_and_what_is_saved_loads(kind, lora, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "trial"
    folder.mkdir()
    workload = tune(tmp_path, kind, lora=lora, save=True)
    plain = workload.subject(NVFP4, prepared_clock(), torch.device("cpu")).model.state_dict()
    assert run(workload, checkpoints=Checkpoints(folder / "checkpoint.pt", "trial", 60))
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model", local_files_only=True)
    assert list(loaded.state_dict()) == list(plain)
    trained = run_of(workload)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        # Adapters beside a layer and added to it are two sums of bf16 products: 2 % of the logits' range.
        expected, found = trained(input_ids=tokens).logits, loaded(input_ids=tokens).logits
    assert (expected - found).abs().max() < 0.02 * expected.abs().max()
    changed = [name for name, value in loaded.state_dict().items() if not torch.equal(value, plain[name])]
    assert changed
    assert lora is None or all("proj" in name or "attn.c_" in name or "mlp.c_" in name for name in changed)


def prepared_clock():
    from ablate.numerics.philox import Clock

    return Clock(0)


def run_of(workload):
    """The model of a run, trained, every layer in high precision."""
    ready = workload.prepare(NVFP4, 0, "cpu")
    for _ in workload.train(ready, UNMEASURED):
        pass
    ready.model.eval()
    for layer in ready.engine.layers.values():
        layer.products = PRESETS["bf16"]().products
    return ready.model


def test_adapters_alone_are_trained_over_layers_that_the_recipe_quantises(tmp_path):
    workload = tune(tmp_path, lora=Lora(rank=2, targets=("q_proj", "mlp.down_proj")), steps=30, lr=3e-2)
    ready = workload.prepare(NVFP4, 0, "cpu")
    trained = {name for name, p in ready.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2  # layers, targets, A and B
    assert all("lora_" in name and ("q_proj" in name or "down_proj" in name) for name in trained)
    frozen = {name: p.clone() for name, p in ready.model.named_parameters() if not p.requires_grad}
    losses = [record.metrics["train/loss"] for record in workload.train(ready, UNMEASURED)]
    assert sum(losses[-5:]) < sum(losses[:5]) - 5 * 0.1
    after = dict(ready.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert set(ready.engine.layers) == set(workload.linears)
    assert all(layer.products.fprop == NVFP4.fprop for layer in ready.engine.layers.values())
    adapters = [
        module
        for name, module in ready.model.named_modules()
        if "lora_" in name and isinstance(module, torch.nn.Linear)
    ]
    assert adapters
    assert not any(isinstance(module, EmulatedLinear) for module in adapters)


def test_a_policy_works_on_the_models_own_names(tmp_path):
    workload = Gpt(**(FIELDS | {"data": shards(tmp_path), "model": MODELS["qwen3"]}))
    assert (workload.blocks, len(workload.linears)) == (2, 14)
    assert workload.linears[0] == "model.layers.0.self_attn.q_proj"
    rules = (Rule(match="*.self_attn.*"),)
    for layers, quantised in (
        (Layers(skip_first=1), {n for n in workload.linears if ".1." in n}),
        (Layers(skip_last=1), {n for n in workload.linears if ".0." in n}),
        (Layers(rules=rules), {n for n in workload.linears if ".mlp." in n}),
    ):
        ready = workload.prepare(NVFP4.model_copy(update={"layers": layers}), 0, "cpu")
        ready.engine.at(0, Run(4))
        assert {name for name, layer in ready.engine.layers.items() if not layer.products.plain} == quantised
        assert not isinstance(ready.model.lm_head, EmulatedLinear)


def test_a_configuration_is_pretrained_from_the_seed_alone(tmp_path):
    workload = Gpt(**(FIELDS | {"data": shards(tmp_path), "model": MODELS["llama"]}))
    torch.manual_seed(1)
    first, state = run(workload), torch.get_rng_state()
    torch.manual_seed(2)
    assert run(workload) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert first[-1][1]["val/loss"] < math.log(64)


def test_recomputed_activations_change_no_bit_of_a_model_of_transformers(tmp_path):
    lora = Lora(rank=2, dropout=0.3)
    recomputed, kept = (
        run(tune(tmp_path, lora=lora, recompute=each), telemetry=OFTEN) for each in (True, False)
    )
    assert recomputed == kept


def test_a_second_draw_of_a_gradient_has_the_dropout_of_the_first(tmp_path):
    recipe = PRESETS["mxfp4"]().changed({"wgrad.g.rounding": "stochastic"})  # of a product that lora lacks
    assert recipe.draws
    records = run(tune(tmp_path, lora=Lora(rank=2, dropout=0.3)), recipe, telemetry=OFTEN)
    assert {one["grad/variance"] for _, one in records if "grad/variance" in one} == {0.0}


def test_a_base_is_trained_once_and_is_better_than_none(tmp_path, monkeypatch):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "cache"))
    base = Base(steps=30, lr=1e-2, data=shards(tmp_path))
    workload = tune(tmp_path, base=base, lr=1e-4)
    first = [one for one in run(workload) if one[0]]  # a busy machine notes its patience at step 0
    (made,) = (tmp_path / "cache" / "models").glob("*/model.safetensors")
    moment = made.stat().st_mtime_ns
    assert run(workload, seed=1)[0] != first[0]
    assert made.stat().st_mtime_ns == moment
    assert first[0][1]["train/loss"] < run(tune(tmp_path, lr=1e-4))[0][1]["train/loss"] - 0.3


def test_a_trial_says_that_its_base_is_still_trained_and_records_the_same_afterwards(tmp_path, monkeypatch):
    """Without a word for 10 times the patience it would be taken for hung: see supervisor.SilenceTimer, which hears these."""
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "cache"))
    ticks = count(step=6.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))  # a beat is due at every look
    workload = tune(tmp_path, base=Base(steps=6, lr=1e-2, data=shards(tmp_path)))
    first = run(workload)
    assert first[:6] == [(0, {})] * 6  # one a step
    assert first[6:] == run(workload)
    assert first[6][0] == 1
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heard = SilenceTimer(patience=1.0)
    for _ in range(4):
        now += 9.0
        assert heard.silence < heard.limit == 10.0
        heard.note(Events(({"step": 0, "time": time.time(), "metrics": {}},)))


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"lora": Lora(targets=("k_prj",))}, "lora.targets", "'k_prj' matches no layer; the nearest: k_proj"),
        ({"model": "./nowhere"}, "model", "no such folder or file; give a folder with config.json"),
        (
            {"model": MODELS["qwen3"] | {"vocab_size": 32}},
            "model",
            "has 32 tokens, and the data's vocabulary has 64",
        ),
        (
            {"model": MODELS["qwen3"] | {"max_position_embeddings": 8}},
            "context",
            "16 is longer than the model's positions reach: 8",
        ),
        ({"model": {"model_type": "qwen33"}}, "model", "no model type of transformers; the nearest: qwen3"),
        (
            {"model": MODELS["qwen3"] | {"hidden_sise": 8}},
            "model",
            "has no field hidden_sise; the nearest: hidden_size",
        ),
        (
            {"model": MODELS["qwen3"] | {"num_hidden_layers": "two"}},
            "model",
            "transformers refuses this qwen3",
        ),
        (
            {"model": MODELS["qwen3"] | {"num_hidden_layers": 0}},
            "model",
            "no linear layer inside numbered blocks",
        ),
    ],
)
def test_what_cannot_run_is_said_with_what_would(fields, field, why, tmp_path):
    assert why in dict(tune(tmp_path, **fields).problems())[field]


def test_a_saved_model_is_tuned_on_and_its_weights_are_its_identity(tmp_path):
    folder = tmp_path / "trial"
    folder.mkdir()
    run(tune(tmp_path, save=True), checkpoints=Checkpoints(folder / "checkpoint.pt", "trial", 60))
    tuned = tune(tmp_path, model=str(folder / "model"), steps=2)
    assert list(tuned.problems()) == []
    before = tuned.fingerprint()
    assert run(tuned)[0][1]["train/loss"] < run(tune(tmp_path, steps=2))[0][1]["train/loss"]
    weights = folder / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert tuned.fingerprint() != before
    assert "leave one of them out" in dict(tuned.model_copy(update={"base": Base()}).problems())["base"]


def test_fields_of_the_houses_own_model_have_no_place_beside_another(tmp_path):
    workload = Gpt(**(FIELDS | {"data": shards(tmp_path), "model": MODELS["qwen3"], "layers": 3}))
    assert "has no effect" in dict(workload.problems())["layers"]
    assert "layers" not in workload.identity()


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("{finetune: {model: /nope/x}}", "finetune.model: '/nope/x': model /nope/x: no such folder or file"),
        (
            "{gpt: {model: /nope/x, guard: {policy: fallback, fallback: {precision: fp8, layers: ['model.*']}}}}",
            "model /nope/x: no such",
        ),
        ("{gpt: {model: {model_type: vit}}}", "transformers' vit is no causal language model"),
        (
            "{gpt: {model: {model_type: llama, num_key_value_heads: 0}}}",
            "transformers cannot build this llama: integer division",
        ),
        (
            "{gpt: {model: {model_type: llama, hidden_act: sillu}}}",
            "transformers cannot build this llama: 'sillu'",
        ),
        (
            "{finetune: {data: {text: /nope.txt}}}",
            "workload.finetune.data: {'text': '/nope.txt'}: cannot be read",
        ),
        (
            "{finetune: {base: {data: {text: /nope.txt}}}}",
            "workload.finetune.base.data: {'text': '/nope.txt'}: cannot be read",
        ),
        ("{finetune: {lora: {targets: []}}}", "targets"),
    ],
)
def test_a_plan_of_what_cannot_be_had_is_refused_in_sentences(workload, expected, tmp_path):
    path = tmp_path / "x.yaml"
    rest = "ablate: {rht: [true, false]}\nagainst: bf16\nseeds: 1\nmetric: {name: val/loss}\n"
    path.write_text(f"schema: 1\nquestion: why\nworkload: {workload}\nrecipe: nvfp4\n{rest}")
    with pytest.raises(InputError) as refused:
        load(path)
    assert expected in str(refused.value)


def test_weights_that_are_not_all_there_are_not_drawn_anew(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "trial"
    folder.mkdir()
    run(tune(tmp_path, save=True), checkpoints=Checkpoints(folder / "checkpoint.pt", "trial", 60))
    weights = folder / "model" / "model.safetensors"
    kept = {name: value for name, value in load_file(weights).items() if ".layers.1.mlp." not in name}
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"its weights lack model\.layers\.1\.mlp\.down_proj\.weight \(and 2 more\)"
    ):
        run(tune(tmp_path, model=str(folder / "model")))
    weights.unlink()
    assert "holds no weights" in dict(tune(tmp_path, model=str(folder / "model")).problems())["model"]


def test_code_that_lies_beside_a_model_is_never_run(tmp_path):
    (tmp_path / "configuration_weird.py").write_text("raise SystemExit('executed')")
    (tmp_path / "config.json").write_text(
        '{"model_type": "weird", "auto_map": {"AutoConfig": "configuration_weird.Weird"}}'
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert (
        "no configuration that transformers can read"
        in dict(tune(tmp_path, model=str(tmp_path)).problems())["model"]
    )


def test_where_a_model_lies_is_no_part_of_a_trial(tmp_path):
    folder = tmp_path / "trial"
    folder.mkdir()
    run(tune(tmp_path, save=True), checkpoints=Checkpoints(folder / "checkpoint.pt", "trial", 60))
    shutil.copytree(folder / "model", tmp_path / "elsewhere")
    one, other = (tune(tmp_path, model=str(place)) for place in (folder / "model", tmp_path / "elsewhere"))
    assert (one.identity(), one.fingerprint()) == (other.identity(), other.fingerprint())


def test_the_share_of_fp4_counts_no_product_that_is_not_computed(tmp_path):
    """With adapters no wgrad of the quantised layers is."""
    found = {lora: run(tune(tmp_path, lora=lora))[-1][1]["flops/fp4_share"] for lora in (None, Lora(rank=2))}
    assert list(found.values()) == [1.0, 1.0]
    forward = NVFP4.model_copy(update={"dgrad": PRESETS["bf16"]().dgrad, "wgrad": PRESETS["bf16"]().wgrad})
    assert run(tune(tmp_path, lora=Lora(rank=2)), forward)[-1][1]["flops/fp4_share"] == 0.5
