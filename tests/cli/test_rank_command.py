"""`ablate rank`: tables and JSON of recipes ordered by their operands' errors, and what it refuses."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support.experiments import tiny

from ablate.cli.rank import rank
from ablate.errors import InputError
from ablate.experiment.predicted_order import predicted_order
from ablate.training.data.documents import Piece
from ablate.training.data.tokenisers import open_tokeniser
from ablate.verification.operand_order import MEASURED

ROOT = Path(__file__).parents[2]
RECIPES = ["nvfp4", "quartet2", "mxfp4", "mxfp4_backward", "bf16"]
SHAPE = {"vocab_size": 512, "num_hidden_layers": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}


@pytest.fixture
def dumps(tmp_path):
    """Dumps of four layers in two steps."""
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        folder = tmp_path / "dumps" / f"iter_{step:06}"
        folder.mkdir(parents=True)
        for layer in ("up", "down", "out", "gate"):
            shapes = {"x": (32, 128), "w": (64, 128), "dy": (32, 64)}
            tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
            torch.save(tensors, folder / f"{layer}.pt")
    return tmp_path / "dumps"


def document(capsys, recipes, **options):
    rank(recipes, **{"every": False, "batches": 1, "as_json": True} | options)
    return json.loads(capsys.readouterr().out)


def test_json_has_every_recipe_in_its_group_and_the_same_numbers_again(dumps, capsys):
    made = document(capsys, RECIPES, dumps=dumps)
    assert made == document(capsys, RECIPES, dumps=dumps)
    rows = {row["recipe"]: row for row in made["recipes"]}
    assert sorted(rows) == sorted(RECIPES)
    assert rows["bf16"]["error"] == 0
    assert rows["mxfp4"]["bias"] > rows["nvfp4"]["bias"]
    for row in rows.values():
        assert row["error"] == pytest.approx(row["fprop"] + row["dgrad"] + row["wgrad"])
    assert (rows["mxfp4"]["draws"], rows["nvfp4"]["draws"]) == (False, True)
    named = {frozenset((pair["first"], pair["second"])) for pair in made["pairs"]}
    assert named == {
        frozenset(pair) for pair in (("nvfp4", "quartet2"), ("nvfp4", "mxfp4"), ("quartet2", "mxfp4"))
    }


def test_a_plan_of_the_ranked_experiment_has_its_order(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "cache"))
    experiment = tiny(tmp_path, ablate={"recipe": RECIPES[:3]})
    orders = [pair["order"] for pair in document(capsys, RECIPES, python=experiment.file)["pairs"]]
    open_pairs = [order for order in orders if order not in ("first", "second")]
    (line,) = predicted_order(experiment)
    assert "this workload" in line
    assert f"{len(open_pairs)} of {len(orders)} pairs not ordered" in line


def test_the_table_has_groups_accuracy_and_no_word_of_a_verdict(dumps, capsys):
    rank(RECIPES, every=False, dumps=dumps, batches=1)
    out = " ".join(capsys.readouterr().out.split())
    for word in (
        "forward and backward pass",
        "backward pass alone",
        "nothing quantised",
        "= error",
        "refused 10",
    ):
        assert word in out
    assert not re.search(r"\b(better|worse|equivalent)\b", out)


def test_a_recipe_file_with_a_rounding_of_ones_own_is_ranked(dumps, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef down(y, grid):\n"
        "    lower, _ = grid.neighbours(y.abs())\n    return lower.copysign(y)\n"
    )
    own = tmp_path / "own.yaml"
    own.write_text("from: mxfp4\nfprop: {x: {rounding: 'mine.py:down'}}\n")
    made = document(capsys, ["mxfp4", str(own)], dumps=dumps)
    first, second = made["recipes"]
    assert [first["recipe"], second["recipe"]] == ["mxfp4", str(own)]
    assert second["fprop"] > first["fprop"]
    assert made["pairs"] == [{"first": "mxfp4", "second": str(own), "order": "first"}]


def test_a_configuration_alone_is_ranked_as_its_folder_without_weights(tmp_path, capsys):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", **sizes, **SHAPE}))
    alone, folder = (document(capsys, RECIPES[:3], model=str(each)) for each in (file, tmp_path))
    assert alone["recipes"] == folder["recipes"]
    rank(["nvfp4", "four_over_six"], every=False, batches=1, model=str(file))  # keeps the last block in bf16
    assert "four_over_six leaves 7 of 14 so" in " ".join(capsys.readouterr().out.split())
    file.write_text("[1]")
    with pytest.raises(InputError, match=r"no configuration of transformers: .*not a JSON object"):
        rank(["nvfp4"], every=False, model=str(file))


def test_a_saved_model_reads_english_in_its_own_tokens(tmp_path, capsys):
    causal = pytest.importorskip("ablate.training.models.causal")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
    model = causal.build({"model_type": "gpt2", **sizes}, 300, 1, torch.device("cpu"))
    model.save_pretrained(tmp_path)
    as_bytes = document(capsys, ["nvfp4"], model=str(tmp_path))
    tokeniser = open_tokeniser("bpe:300", lambda: [Piece(b"the quick brown fox " * 99, True, "text")])
    (tmp_path / "tokenizer.json").write_text(tokeniser.json)
    own = document(capsys, ["nvfp4"], model=str(tmp_path))
    assert "batches: 1 of bytes as tokens" in as_bytes["measured_on"]
    assert "batches: 1 of English in its own tokens" in own["measured_on"]
    assert own["recipes"] != as_bytes["recipes"]


def test_packed_experts_are_ranked_and_those_without_tokens_counted(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3_moe", **sizes, **experts, **SHAPE}))
    made = document(capsys, ["nvfp4", "four_over_six"], model=str(file))
    words = r", (\d+) converted layers, batches: 1 of bytes as tokens(?:, without (\d+) of experts that some batch has no token for)?"
    layers, idle = re.search(words, made["measured_on"]).groups()
    assert int(layers) + int(idle or 0) == 2 * (4 + 2 * 8)  # attention's four, and gate_up and down of each
    assert int(layers) > 2 * 4
    assert {row["recipe"]: row["four_bits"] for row in made["recipes"]} == {"nvfp4": 1, "four_over_six": 0.5}


def test_rules_on_layers_that_cannot_be_placed_are_told(dumps, capsys):
    told = {
        name: document(capsys, [name], dumps=dumps)["measured_on"].endswith(", rules on layers left out")
        for name in ("nvfp4", "four_over_six")
    }
    assert told == {"nvfp4": False, "four_over_six": True}


@pytest.mark.parametrize(
    ("recipes", "options", "why"),
    [
        (["nvfp5"], {}, "nvfp5: no such preset; 'nvfp4' is the nearest"),
        (["missing.yaml"], {}, "missing.yaml: no such recipe file"),
        (["nvfp4"], {"every": True}, "give recipes or --all"),
        (["nvfp4"], {"model": "x", "dumps": Path("y")}, "at most one of --model"),
        (["nvfp4"], {"python": "train.py"}, "write FILE:FUNCTION"),
        (["nvfp4"], {"dumps": Path("nowhere")}, "nowhere is no folder"),
        (["nvfp4"], {"python": "trian.py:train"}, "no such file as trian.py"),
    ],
)
def test_mistakes_are_one_sentence(recipes, options, why, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(why)):
        rank(recipes, **{"every": False, "batches": 1} | options)


def test_a_dump_without_a_gradient_is_refused(tmp_path):
    torch.save({"x": torch.ones(16, 16), "w": torch.ones(16, 16)}, tmp_path / "up.pt")
    with pytest.raises(InputError, match="up has no dy"):
        rank(["nvfp4"], every=False, dumps=tmp_path, batches=1)


def test_the_accuracy_elsewhere_is_that_of_the_committed_predictions(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location("rank_evidence", ROOT / "benchmarks" / "rank_evidence.py")
    evidence = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rank_evidence", evidence)
    spec.loader.exec_module(evidence)
    lines = [*evidence.elsewhere()]
    own = MEASURED["16 other publications"]
    assert f"| all, order | {own.pairs} | {own.decided} | {own.right} | " in "\n".join(lines)
    (interval,) = (line for line in lines if line.startswith("order: "))
    assert f"({own.low:.2f} to {own.high:.2f})" in interval
