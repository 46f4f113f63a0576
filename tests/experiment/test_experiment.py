"""An experiment as written and as meant: every mistake refused at its place, all at once, and what a good file expands to."""

import dataclasses
import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML
from support.cases import every
from support.experiments import EXPERIMENTS, SHAPE, VOCAB, content, problems, shards, tiny, write

from ablate.errors import InputError, nearest
from ablate.experiment.arms import KnobError
from ablate.experiment.load import load, sweep_name
from ablate.experiment.roles import CONFIRM
from ablate.experiment.schema import MOST_TRIALS, Metric, json_schema
from ablate.experiment.search_space import Dimension, twins
from ablate.experiment.yaml_document import Document
from ablate.recipes import PRESETS
from ablate.training.workloads import WORKLOADS

GOOD = """
    schema: 1
    question: Does it matter?
    workload: {{gpt: {{layers: 2, width: 32, heads: 2, context: 16, batch: 2, steps: 4}}}}
    {}
"""
"""Line 4 and what follows is the test's."""


def told(folder: Path, text: str) -> list[str]:
    """Return the problems of the text, as `line:column: message`."""
    path = folder / "x.yaml"
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return [str(problem).removeprefix(f"{path}:") for problem in problems(path)]


def told_of(folder: Path, lines: str) -> list[str]:
    """Return the problems of a good file that has these lines (from line 4) in it."""
    return told(folder, GOOD.format(textwrap.indent(textwrap.dedent(lines).strip(), "    ").strip()))


REFUSED = {
    "unknown knob": (
        "ablate: {rhtt: [true]}",
        "4:10: ablate.rhtt: no such knob; 'rht' is the nearest of rht, ",
    ),
    "answer of a knob with one value": (
        "ablate: {rht: [true]}\nagainst: bf16\nanswer: {knob: rht}",
        "6:10: answer.knob: 'rht': has one value, so that there is nothing to compare",
    ),
    "unknown path": (
        "ablate: {recipe.wgrad.y: [null]}",
        "4:10: ablate.recipe.wgrad.y: no such knob; 'x' is the nearest of x, ",
    ),
    "value of no type of several": (
        "ablate: {rht: [true]}\nmetric: {name: val/loss, min_effect: -5}",
        "5:26: metric.min_effect: -5: input should be greater than 0",
    ),
    "item of no type of several": (
        "ablate: {rht: [true]}\ndesign: {trunk: bf16, window: 0.5, positions: [0.5, a]}",
        "5:53: design.positions.1: 'a': input should be a valid number",
    ),
    "unknown top-level key": (
        "ablate: {rht: [true]}\nsead: 3",
        "5:1: sead: 3: no such key; 'seeds' is the nearest of seeds, ",
    ),
    "key of another mapping": (
        "ablate: {rht: [true]}\nkeep_weights: true",
        "5:1: keep_weights: true: no such key here; write telemetry.keep_weights",
    ),
    "key of the search": (
        "ablate: {rht: [true]}\nsampler: tpe",
        "5:1: sampler: 'tpe': no such key here; write search.sampler",
    ),
    "key of the workload, which is a knob too": (
        "ablate: {rht: [true]}\nlr: 1.0e-3",
        "5:1: lr: 0.001: no such key here; write workload.gpt.lr or ablate.lr",
    ),
    "key of the metric": (
        "ablate: {rht: [true]}\nmin_effect: 1%",
        "5:1: min_effect: '1%': no such key here; write metric.min_effect",
    ),
    "key of another mapping, within one": (
        "ablate: {rht: [true]}\nbudget: {keep_weights: true}",
        "5:10: budget.keep_weights: true: no such key here; write telemetry.keep_weights",
    ),
    "key of a list's items": (
        "ablate: {rht: [true]}\ntolerance: 0.1",
        "5:1: tolerance: 0.1: no such key here; write published.<n>.tolerance",
    ),
    "unknown preset": (
        "ablate: {recipe: [nvfp5]}",
        "4:19: ablate.recipe.0: 'nvfp5': no such preset; 'nvfp4' is the nearest of nvfp4, ",
    ),
    "out of range": (
        "ablate: {cooldown: [0.5, 1.5]}",
        "4:26: ablate.cooldown.1: 1.5: input should be less than or equal to 1",
    ),
    "number for a bool": ("ablate: {rht: [1]}", "4:16: ablate.rht.0: 1: input should be a valid boolean"),
    "YAML 1.1 bool": ("ablate: {rht: [on]}", "4:16: ablate.rht.0: 'on': input should be a valid boolean"),
    "number as text": (
        "ablate: {workload.lr: ['1e-3']}",
        "4:24: ablate.workload.lr.0: '1e-3': input should be a valid number",
    ),
    "bool for a number": (
        "ablate: {skip_first: [true]}",
        "4:23: ablate.skip_first.0: true: input should be a valid integer",
    ),
    "infinite rate": (
        "ablate: {workload.lr: [.inf]}",
        "4:24: ablate.workload.lr.0: inf: input should be a finite number",
    ),
    "not a number": (
        "ablate: {workload.lr: [.nan]}",
        "4:24: ablate.workload.lr.0: nan: input should be a finite number",
    ),
    "negative rate": (
        "ablate: {workload.lr: [-1.0]}",
        "4:24: ablate.workload.lr.0: -1.0: input should be greater than 0",
    ),
    "empty grid": ("ablate: {}", "4:1: ablate: is empty: name at least one knob"),
    "no grid": ("ablate:", "1:1: give one of `ablate` (knobs and their values), `arms`"),
    "both": (
        "ablate: {rht: [true]}\narms: {a: {sr: true}}",
        "1:1: give one of `ablate` (knobs and their values), `arms`",
    ),
    "no arms": ("arms: {}", "4:1: arms: is empty: name at least one arm"),
    "empty list": (
        "ablate: {rht: []}",
        "4:10: ablate.rht: []: is an empty list: an empty grid; give the values to try",
    ),
    "single value": ("ablate: {rht: true}", "4:10: ablate.rht: true: is a single value; give a list, [true]"),
    "duplicate value": (
        "ablate: {rht: [true, false, true]}\nsearch: {trials: 2}",
        "4:29: ablate.rht.2: true: is given twice",
    ),
    "duplicate arm": (
        "arms: {a: {rht: true}, b: {recipe.wgrad.hadamard: {size: 16, signs: fixed}}}",
        "4:24: arms.b: arm 'b' is the same as 'a': a duplicate arm would be run and counted twice",
    ),
    "duplicate arm by default": (
        "arms: {a: {}, b: {cooldown: 0}}",
        "4:15: arms.b: arm 'b' is the same as 'a'",
    ),
    "sr by its full paths": (
        "arms: {a: {sr: false}, b: {recipe.dgrad.g.rounding: nearest, recipe.wgrad.g.rounding: nearest}}",
        "4:24: arms.b: arm 'b' is the same as 'a'",
    ),
    "duplicate key": ("ablate:\n  rht: [true]\n  rht: [false]", "6:3: rht: is given twice"),
    "missing baseline": (
        "ablate: {rht: [true]}\nagainst: bf17",
        "5:1: against: 'bf17': no such baseline: neither a preset nor an arm; 'bf16' is the nearest of bf16, ",
    ),
    "null baseline": (
        "ablate: {rht: [true]}\nagainst: null",
        "5:1: against: null: must be a preset, an arm's name, or knobs as {knob: value}",
    ),
    "bad baseline knob": (
        "ablate: {rht: [true]}\nagainst: {srr: true}",
        "5:11: against.srr: true: no such knob; 'sr' is the nearest",
    ),
    "short name and full path": (
        "ablate: {rht: [true], recipe.wgrad.hadamard.size: [32]}",
        "4:52: ablate.recipe.wgrad.hadamard.size.0: 32: sets recipe.wgrad.hadamard.size, which rht sets too; keep one of them",
    ),
    "two full paths": (
        "ablate: {recipe.wgrad.g: [{rounding: nearest}], recipe.wgrad.g.rounding: [nearest]}",
        "4:75: ablate.recipe.wgrad.g.rounding.0: 'nearest': sets recipe.wgrad.g.rounding, which recipe.wgrad.g sets too",
    ),
    "path through what is off": (
        "recipe: bf16\nablate: {recipe.wgrad.g.rounding: [nearest]}",
        "5:36: ablate.recipe.wgrad.g.rounding.0: 'nearest': wgrad.g is off (null) in this arm, so it has no rounding",
    ),
    "path through a leaf": (
        "ablate: {recipe.dtype.bits: [8]}",
        "4:30: ablate.recipe.dtype.bits.0: 8: dtype has no parts; set dtype itself",
    ),
    "nothing quantised": (
        "ablate: {skip_first: [0, 2]}",
        "4:26: ablate.skip_first.1: 2: keeps all 8 layers in 2 blocks in high precision: nothing is quantised, as in preset bf16",
    ),
    "range without search": (
        "ablate: {workload.lr: {uniform: [1.0e-4, 1.0e-2]}}",
        "4:10: ablate.workload.lr: is a range, which needs `search: {trials: ...}`",
    ),
    "too many arms": (
        f"ablate: {{workload.steps: {list(range(1, 102))}, workload.batch: {list(range(1, 101))}}}",
        "4:1: ablate: makes more than 10000 arms, the largest number in a grid; add `search` to sample them",
    ),
    "no seeds": (
        "ablate: {rht: [true]}\nseeds: 0",
        "5:1: seeds: 0: must be a number of seeds (1 to 10,000), a list of different seeds",
    ),
    "growth of one": (
        "ablate: {rht: [true]}\nseeds: {start: 1, most: 4}",
        "5:9: seeds.start: 1: input should be greater than or equal to 2",
    ),
    "growth of nothing": (
        "ablate: {rht: [true]}\nseeds: {start: 4, most: 4}",
        "5:1: seeds: {'start': 4, 'most': 4}: most: 4 must be above start: 4; without growth write seeds: 4",
    ),
    "growth to a typo": (
        "ablate: {rht: [true]}\nseeds: {start: 4, most: 6, steps: 2}",
        "5:28: seeds.steps: 2: no such key; 'step' is the nearest of step, ",
    ),
    "growth of a search": (
        "ablate: {cooldown: {uniform: [0, 1]}}\nsearch: {trials: 2}\nseeds: {start: 3, most: 9}",
        "6:1: seeds: a search runs its arms on a fixed number of seeds; write seeds: 3",
    ),
    "seed twice": ("ablate: {rht: [true]}\nseeds: [1, 2, 1]", "5:1: seeds: [1, 2, 1]: a seed is given twice"),
    "seed of 2^32": (
        "ablate: {rht: [true]}\nseeds: [4294967296]",
        "5:1: seeds: [4294967296]: must be a number of seeds",
    ),
    "number for a preset": (
        "ablate: {rht: [true]}\nrecipe: 4",
        "5:1: recipe: 4: a recipe is a preset's name, a recipe file",
    ),
    "metric direction": (
        "ablate: {rht: [true]}\nmetric: {name: val/loss, direction: down}",
        "5:26: metric.direction: 'down': input should be 'minimize' or 'maximize'",
    ),
    "two objectives for a sampler of one": (
        "ablate: {rht: [true]}\nsearch: {trials: 2, sampler: cmaes}\nmetric: [{name: val/loss}, {name: grad/norm}]",
        "5:21: search.sampler: 'cmaes': takes one objective, and metric lists 2; nsga2, tpe, gp, random take several",
    ),
    "a pruner for two objectives": (
        "ablate: {rht: [true]}\nsearch: {trials: 2, pruner: median, rungs: [2]}\nmetric: [{name: val/loss}, {name: grad/norm}]",
        "5:21: search.pruner: 'median': judges by one objective, and metric lists 2: leave the pruner out, or give one metric",
    ),
    "an unknown metric among several": (
        "ablate: {rht: [true]}\nmetric: [{name: val/loss}, {name: val/los}]",
        "5:29: metric.1.name: 'val/los': no such metric of gpt; 'val/loss' is the nearest",
    ),
    "a mean over an interval of telemetry": (
        "ablate: {rht: [true]}\nmetric: {name: train/loss}",
        "5:10: metric.name: 'train/loss': is the mean since the record before, so telemetry.log and guards change it; use train/recent_loss",
    ),
    "a measurement of telemetry": (
        "ablate: {rht: [true]}\nmetric: [{name: val/loss}, {name: quant/fprop.x/sqnr_db}]",
        "5:29: metric.1.name: 'quant/fprop.x/sqnr_db': is measured at the steps that telemetry sets",
    ),
    "a constraint on a gradient that telemetry compares": (
        "ablate: {rht: [true]}\nsearch: {trials: 2}\nconstraints: [{metric: grad/noise_ratio, at_least: 2}]",
        "6:16: constraints.0.metric: 'grad/noise_ratio': is measured at the steps that telemetry sets",
    ),
    "a metric twice": (
        "ablate: {rht: [true]}\nmetric: [{name: val/loss}, {name: val/loss}]",
        "5:28: metric.1: 'val/loss': is given twice",
    ),
    "no metric": ("ablate: {rht: [true]}\nmetric: []", "5:1: metric: []: is an empty list"),
    "a published figure of no arm": (
        "ablate: {rht: [true]}\npublished: [{arm: rht, metric: val/loss, value: 3.0, source: x}]",
        "5:14: published.0.arm: 'rht': no such arm; 'rht=true' is the nearest",
    ),
    "a published difference from no arm": (
        "ablate: {rht: [true]}\npublished: [{arm: rht=true, against: fp8, metric: val/loss, value: lower, source: x}]",
        "5:29: published.0.against: 'fp8': no such arm; 'bf16' is the nearest",
    ),
    "a published difference from the arm itself": (
        "ablate: {rht: [true]}\npublished: [{arm: bf16, against: bf16, metric: val/loss, value: 0.1, source: x}]",
        "5:13: published.0: {'arm': 'bf16', 'against': 'bf16', 'metric': 'val/loss', ...: against bf16 is the arm itself",
    ),
    "a published ordering of one arm": (
        "ablate: {rht: [true]}\npublished: [{arm: bf16, metric: val/loss, value: lower, source: x}]",
        "5:13: published.0: {'arm': 'bf16', 'metric': 'val/loss', 'value': 'lower', '...: value lower compares two arms: name the",
    ),
    "a published difference with a tolerance": (
        "ablate: {rht: [true]}\npublished: [{arm: rht=true, against: bf16, metric: val/loss, value: 0.1, tolerance: 0.1, source: x}]",
        "5:13: published.0: {'arm': 'rht=true', 'against': 'bf16', 'metric': 'val/los...: tolerance is for a figure of one arm; a",
    ),
    "a published word that is none": (
        "ablate: {rht: [true]}\npublished: [{arm: rht=true, against: bf16, metric: val/loss, value: better, source: x}]",
        "5:62: published.0.value: 'better': must be a number, a share such as -1.0%, lower, higher or no difference",
    ),
    "a published figure of an unknown metric": (
        "ablate: {rht: [true]}\npublished: [{arm: rht=true, metric: loss, value: 3.0, source: x}]",
        "5:29: published.0.metric: 'loss': no such metric of gpt",
    ),
    "one and a half GPUs": (
        "ablate: {rht: [true]}\nresources: {gpus: 1.5}",
        "5:1: resources: {'gpus': 1.5}: gpus 1.5 is neither a fraction of one GPU nor a whole number",
    ),
    "a bit more than one GPU": (
        "ablate: {rht: [true]}\nresources: {gpus: 1.0000001}",
        "5:1: resources: {'gpus': 1.0000001}: gpus 1.0000001 is neither a fraction of one GPU",
    ),
    "ranks without a GPU each": (
        "ablate: {rht: [true]}\nresources: {gpus: 8, ranks: 4}",
        "5:1: resources: {'gpus': 8, 'ranks': 4}: ranks 4 differ from gpus 8: each",
    ),
    "several GPUs for one rank of a built-in workload": (
        "ablate: {rht: [true]}\nresources: {gpus: 4, ranks: 1}",
        "5:1: resources: arm bf16: workload gpt uses one GPU a rank, of 4; leave out ranks: 1",
    ),
    "ranks on a part of a GPU": (
        "ablate: {rht: [true]}\nresources: {gpus: 0.5, ranks: 2}",
        "5:1: resources: {'gpus': 0.5, 'ranks': 2}: ranks 2 of a trial with 0.5 of a GPU",
    ),
    "sharded on one rank": (
        "ablate: {rht: [true]}\nresources: {sharded: true}",
        "5:1: resources: {'sharded': True}: sharded has no effect on one rank; give gpus or ranks",
    ),
    "ranks that share out no micro-batch": (
        "ablate: {rht: [true]}\nresources: {ranks: 3}",
        "5:1: resources: arm bf16: 3 ranks share the 1 micro-batch of a step, 3 one each, and 3 does not divide workload.batch 2; a",
    ),
    "ranks that a point of a search cannot be divided among": (
        "ablate: {workload.batch: {int: [2, 3]}}\nsearch: {trials: 2}\nresources: {ranks: 2}",
        "6:1: resources: arm batch=3: 2 ranks share the 1 micro-batch of a step",
    ),
    "rungs without a pruner": (
        "ablate: {rht: [true]}\nsearch: {trials: 2, rungs: [2]}",
        "5:21: search.rungs: has no effect without a pruner",
    ),
    "wilcoxon with rungs": (
        "ablate: {rht: [true]}\nseeds: 5\nsearch: {trials: 2, pruner: wilcoxon, rungs: [2]}",
        "6:39: search.rungs: has no effect: wilcoxon judges an arm as each of its seeds ends, not at steps",
    ),
    "wilcoxon with too few seeds": (
        "ablate: {rht: [true]}\nseeds: 4\nsearch: {trials: 2, pruner: wilcoxon}",
        "6:21: search.pruner: 'wilcoxon': cannot stop an arm before the last of 4 seeds: its test needs 4 pairs to tell arms apart; give 5 seeds or more",
    ),
    "wilcoxon with arms of other sweeps": (
        "ablate: {rht: [true]}\nseeds: 5\nsearch: {trials: 2, pruner: wilcoxon, warm: [other]}",
        "6:21: search.pruner: 'wilcoxon': compares arms seed by seed, and the arms of an earlier sweep have no values by seed; use",
    ),
    "a sweep warmed by itself": (
        "ablate: {rht: [true]}\nsearch: {trials: 2, warm: [x]}",
        "5:21: search.warm: names x, this sweep itself",
    ),
    "a sweep that warms twice": (
        "ablate: {rht: [true]}\nsearch: {trials: 2, warm: [a, a]}",
        "5:31: search.warm.1: 'a': is given twice",
    ),
    "a winner confirmed by one seed": (
        "ablate: {rht: [true]}\nsearch: {trials: 2, confirm: 1}",
        "5:21: search.confirm: 1: input should be greater than or equal to 2",
    ),
    "a pruner of a grid": (
        "ablate: {rht: [true]}\npruner: median",
        "5:1: pruner: 'median': belongs under search: the arms of a grid are compared seed by seed, and none of them may end early",
    ),
    "constraints of a grid": (
        "ablate: {rht: [true]}\nconstraints: [{metric: grad/norm, at_most: 0}]",
        "5:1: constraints: have no effect without a search: every arm of a grid is run and compared; leave them out",
    ),
    "constraints for a sampler that takes none": (
        "ablate: {rht: [true]}\nsearch: {trials: 2, sampler: cmaes}\nconstraints: [{metric: grad/norm, at_most: 0}]",
        "5:21: search.sampler: 'cmaes': takes no constraints; tpe, gp and nsga2 learn where they hold",
    ),
    "a constraint of no metric": (
        "ablate: {rht: [true]}\nsearch: {trials: 2}\nconstraints: [{metric: grad/nor, at_most: 0}]",
        "6:16: constraints.0.metric: 'grad/nor': no such metric of gpt; 'grad/norm' is the nearest",
    ),
    "a constraint with two sides": (
        "ablate: {rht: [true]}\nsearch: {trials: 2}\nconstraints: [{metric: grad/norm, at_most: 0, at_least: 1}]",
        "6:15: constraints.0: {'metric': 'grad/norm', 'at_most': 0, 'at_least': 1}: give either at_most or at_least",
    ),
    "a constraint twice": (
        "ablate: {rht: [true]}\nsearch: {trials: 2}\nconstraints: [{metric: grad/norm, at_most: 0}, {metric: grad/norm, at_most: 1}]",
        "6:48: constraints.1: 'grad/norm at most': is given twice",
    ),
    "constraints that are no mappings": (
        "ablate: {rht: [true]}\nsearch: {trials: 2}\nconstraints: [a]",
        "6:15: constraints.0: 'a': should be a mapping",
    ),
    "cost": (
        "ablate: {rht: [true]}\nbudget: {cost: 0}",
        "5:10: budget.cost: 0: input should be greater than 0",
    ),
    "engine": (
        "ablate: {rht: [true]}\nengine: transformer",
        "5:1: engine: 'transformer': no such engine; 'transformer_engine' is the nearest of",
    ),
    "sampler": (
        "ablate: {rht: [true, false]}\nsearch: {trials: 2, sampler: grid}",
        "5:21: search.sampler: 'grid': input should be 'tpe', 'random', 'gp', 'cmaes' or 'nsga2'",
    ),
    "search of arms": (
        "arms: {a: {}}\nsearch: {trials: 2}",
        "5:1: search: a search turns the knobs of `ablate`",
    ),
}

CONDITIONS = {
    "of an unknown knob": (
        "{rhtt: true}",
        "5:39: ablate.rht_size.when.rhtt: true: no such knob under ablate; 'rht' is the",
    ),
    "of a value that is no choice": (
        "{rht: 1}",
        "5:39: ablate.rht_size.when.rht: 1: is none of rht's choices: true, false",
    ),
    "of itself": (
        "{rht_size: 16}",
        "5:39: ablate.rht_size.when.rht_size: 16: is the knob itself; name another",
    ),
    "of a range": (
        "{cooldown: 0.1}",
        "5:39: ablate.rht_size.when.cooldown: 0.1: cooldown is a range; a condition needs a knob with",
    ),
    "that is no mapping": (
        "rht",
        "5:32: ablate.rht_size.when: 'rht': must name the other knobs' values that this one exists with",
    ),
    "that is empty": (
        "{}",
        "5:32: ablate.rht_size.when: {}: must name the other knobs' values that this one exists with",
    ),
}


@every(case=REFUSED)
def test_a_mistake_is_refused_with_its_place_its_value_and_what_would_be_right(case, tmp_path):
    lines, expected = REFUSED[case]
    found = told_of(tmp_path, lines)
    assert len(found) == 1, found
    assert found[0].startswith(expected)


RUNGS = {
    "none": (
        "median",
        None,
        "search.pruner: 'median': needs rungs, the steps at which arms are judged; valid are 2, 4, 6, 8, 10, 12, ... 30",
    ),
    "where nothing is measured": (
        "median",
        [3],
        "search.rungs.0: 3: not every arm has val/loss there, before its end; valid are 2, 4, 6,",
    ),
    "the last step": (
        "median",
        [2, 32],
        "search.rungs.1: 32: not every arm has val/loss there, before its end; valid are 2, 4, 6, 8, 10",
    ),
    "falling": ("median", [4, 2], "search.rungs: [4, 2]: must rise"),
    "twice": ("median", [2, 2], "search.rungs: [2, 2]: must rise"),
    "uneven": (
        "asha",
        [2, 4, 16],
        "search.rungs: [2, 4, 16]: asha keeps one arm in n at each rung, which comes after n times as many steps",
    ),
    "a fraction": ("hyperband", [4, 6], "search.rungs: [4, 6]: hyperband keeps one arm in n at each rung"),
    "too close": ("asha", [4, 6, 9], "search.rungs.2: 9: not every arm has val/loss there"),
    "one bracket": (
        "hyperband",
        [4],
        "search.rungs: [4]: hyperband starts its brackets at different rungs: give two or more, or use asha",
    ),
}


@pytest.mark.parametrize("name", [".hidden.yaml", " .yaml", "a\nb.yaml"])
def test_a_sweep_that_no_folder_could_be_named_after_is_refused(name):
    with pytest.raises(InputError, match="a sweep is named after its file, and"):
        sweep_name(Path(name))
    assert sweep_name(Path("rht_sr.yaml")) == "rht_sr"


def test_trials_of_all_arms_together_have_a_limit(tmp_path):
    lines = "ablate: {rht: [true], lr: [%s]}\nagainst: bf16\nseeds: 10000"
    rates = [f"{rate}.0e-4" for rate in range(1, 7)]
    assert told_of(tmp_path, lines % ", ".join(rates[:5])) == []
    (problem,) = told_of(tmp_path, lines % ", ".join(rates))
    assert problem.endswith(f"make 120000 trials of all arms; an experiment has at most {MOST_TRIALS}")


def test_a_share_of_no_level_is_no_margin():
    metric = Metric(name="val/loss", direction="minimize", min_effect="1%")
    assert metric.margin(-2.0) == 0.02
    assert metric.margin(0.0) is None


@pytest.mark.parametrize("case", RUNGS)
def test_rungs_that_a_pruner_cannot_use_are_refused(case, tmp_path):
    pruner, rungs, expected = RUNGS[case]
    search = {"trials": 2, "pruner": pruner} | ({"rungs": rungs} if rungs else {})
    found = problems(write(tmp_path, shape={"steps": 32, "eval_every": 2}, search=search))
    assert any(expected in str(problem) for problem in found), found


@pytest.mark.parametrize("pruner", ["median", "asha", "hyperband"])
def test_rungs_at_which_every_arm_is_measured_load(pruner, tmp_path):
    search = {"trials": 2, "pruner": pruner, "rungs": [2, 6, 18]}
    assert tiny(tmp_path, shape={"steps": 32, "eval_every": 2}, search=search).keys.search.rungs == (2, 6, 18)


def test_rungs_must_fit_the_shortest_arm(tmp_path):
    search = {"trials": 2, "pruner": "median", "rungs": [8]}
    knobs = {"workload.steps": {"int": [8, 32]}}
    (problem,) = problems(write(tmp_path, shape={"steps": 32, "eval_every": 2}, ablate=knobs, search=search))
    assert "search.rungs.0: 8: not every arm has val/loss there, before its end; valid are 2, 4, 6" in str(
        problem
    )


def test_a_metric_that_is_recorded_at_the_end_alone_prunes_nothing(tmp_path):
    search = {"trials": 2, "pruner": "median", "rungs": [2]}
    (problem,) = problems(write(tmp_path, metric={"name": "flops/fp4_share"}, search=search))
    assert (
        "search.pruner: 'median': there is no step before the last at which every arm has flops/fp4_share"
        in str(problem)
    )


def test_a_search_has_one_objective_a_metric_and_a_grid_one(tmp_path):
    metrics = [{"name": "val/loss"}, {"name": "flops/fp4_share", "direction": "maximize"}]
    search = tiny(tmp_path, metric=metrics, search={"trials": 2, "sampler": "nsga2"})
    assert [(metric.name, metric.direction) for metric in search.objectives] == [
        ("val/loss", "minimize"),
        ("flops/fp4_share", "maximize"),
    ]
    assert [metric.name for metric in tiny(tmp_path, metric=metrics).objectives] == ["val/loss"]


def test_a_range_of_real_numbers_is_checked_at_both_ends_and_between_them():
    low, high, middle = Dimension("uniform", low=10, high=11).ends()
    assert (low, high) == (10, 11)
    assert low < middle < high
    assert Dimension("int", low=10, high=12).ends() == (10, 12)


def test_the_middle_of_a_knob_is_its_middle_choice_or_that_of_its_scale():
    assert Dimension("choice", choices=("a", "b", "c", "d", "e")).middle == "c"
    assert Dimension("uniform", low=1, high=4).middle == 2.5
    assert Dimension("uniform", low=1, high=4, log=True).middle == 2
    assert Dimension("int", low=1, high=4, log=True).middle == 2


def test_a_range_holds_both_of_its_ends_and_values_of_its_type():
    whole, real = Dimension("int", low=1, high=3), Dimension("uniform", low=0.5, high=2)
    assert [whole.holds(value) for value in (0, 1, 3, 4, 2.0, True)] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert [real.holds(value) for value in (0.4, 0.5, 1, 2, 2.1, "1")] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("case", CONDITIONS)
def test_a_condition_that_makes_no_sense_is_refused_with_its_place(case, tmp_path):
    when, expected = CONDITIONS[case]
    knobs = f"ablate:\n  rht_size: {{choice: [16, 32], when: {when}}}\n  rht: [true, false]\n  cooldown: {{uniform: [0, 1]}}\n"
    found = told_of(tmp_path, knobs + "search: {trials: 2}")
    assert len(found) == 1, found
    assert found[0].startswith(expected)


def test_a_key_that_resembles_a_sibling_and_stands_elsewhere_is_answered_with_both(tmp_path):
    (found,) = told_of(tmp_path, "ablate: {rht: [true]}\nsearch: {trials: 2}\nseed: 3")
    assert found.startswith("6:1: seed: 3: no such key; 'seeds' is the nearest of seeds, ")
    assert found.endswith("; write search.seed")


def test_conditions_that_go_in_a_circle_are_refused(tmp_path):
    lines = "ablate:\n  rht: {choice: [true], when: {sr: true}}\n  sr: {choice: [true, false], when: {rht: true}}\n  skip_first: [0, 1]"
    assert told_of(tmp_path, lines) == ["5:25: ablate.rht.when: is circular: rht, sr depend on each other"]


def test_a_condition_that_can_never_hold_is_refused(tmp_path):
    lines = (
        "ablate:\n  rht: [true, false]\n  rht_size: {choice: [16, 32], when: {rht: true}}\n"
        "  sr: {choice: [true, false], when: {rht_size: 32, rht: false}}"
    )
    assert told_of(tmp_path, lines) == [
        "7:31: ablate.sr.when: can never hold: a knob that it names needs another value of the same knob"
    ]


@every(
    values__expected=[
        ("{layerz: 2}", "3:18: workload.gpt.layerz: 2: no such key; 'layers' is the nearest of layers, "),
        (
            "{keep_weights: true}",
            "3:18: workload.gpt.keep_weights: true: no such key here; write telemetry.keep_weights",
        ),
        ("{layers: 0}", "3:18: workload.gpt.layers: 0: input should be greater than or equal to 1"),
        ("{layers: 2.5}", "3:18: workload.gpt.layers: 2.5: input should be a valid integer"),
        ("{lr: .nan}", "3:18: workload.gpt.lr: nan: input should be a finite number"),
        ("{lr: -.inf}", "3:18: workload.gpt.lr: -inf: input should be a finite number"),
        ("{mlp: gelu}", "3:18: workload.gpt.mlp: 'gelu': input should be 'swiglu' or 'relu2'"),
        ("{width: 100, heads: 3}", "3:30: workload.gpt.heads: 3: 3 does not divide width 100"),
        ("{heads: 4, kv_heads: 3}", "3:28: workload.gpt.kv_heads: 3: 3 does not divide heads 4"),
        ("{experts: {top_k: 2}}", "3:18: workload.gpt.experts.count: is missing"),
        ("{experts: {count: 1}}", "3:28: workload.gpt.experts.count: 1: input should be greater than or "),
        ("{experts: {count: 8, topk: 1}}", "3:38: workload.gpt.experts.topk: 1: no such key; 'top_k' is the"),
        (
            "{experts: {count: 4, top_k: 5}}",
            "3:38: workload.gpt.experts.top_k: 5: a token cannot be sent to 5 of 4 experts",
        ),
        (
            "{hidden: 64, experts: {count: 4, hidden: 32}}",
            "3:18: workload.gpt.hidden: 64: has no effect, since experts.hidden sets the width of an expert",
        ),
        (
            "{compile: true, experts: {count: 4}}",
            "3:18: workload.gpt.compile: true: true needs equal shapes in all steps, and experts get ",
        ),
        (
            "{layers: 2147483648}",
            "3:18: workload.gpt.layers: 2147483648: input should be less than or equal to 1024",
        ),
        (
            "{token_budget: 1000000000000000}",
            "3:12: workload.gpt: {'token_budget': 1000000000000000}: token_budget 1000000000000000 is ",
        ),
        (
            "{model: {model_type: {a: 1}}}",
            "3:18: workload.gpt.model: {'model_type': {'a': 1}}: model_type {'a': 1} is no model type",
        ),
        (
            "{model: {model_type: gpt2, n_layer: 2147483648}}",
            "3:18: workload.gpt.model: {'model_type': 'gpt2', 'n_layer': 2147483648}: n_layer ",
        ),
    ]
)
def test_a_mistake_in_the_workload_is_refused_with_its_place(values, expected, tmp_path):
    text = f"schema: 1\nquestion: q\nworkload: {{gpt: {values}}}\nablate: {{rht: [true]}}\n"
    found = told(tmp_path, text)
    assert len(found) == 1, found
    assert found[0].startswith(expected)


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (
            "{gptt: {}}",
            f"1:12: workload.gptt: no such workload; {nearest('gptt', WORKLOADS)}",
        ),
        (
            "{mae: {}}",
            "1:12: workload.mae: mae is an example of own code now: `ablate init NAME --images` writes it",
        ),
        ("{}", f"1:1: workload: names 0 workloads; give one of {', '.join(WORKLOADS)}"),
        (
            "{gpt: {}, idle: {}}",
            f"1:1: workload: names 2 workloads; give one of {', '.join(WORKLOADS)}",
        ),
        ("[gpt]", "1:1: workload: ['gpt']: should be a mapping"),
    ],
)
def test_a_workload_is_one_known_name(workload, expected, tmp_path):
    assert told(tmp_path, f"workload: {workload}\nschema: 1\nquestion: q\nablate: {{rht: [true]}}\n") == [
        expected
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no file matches"),
        (b"", "0 bytes are not a whole number of uint16 tokens"),
        (b"\0" * 4001, "4001 bytes are not a whole number of uint16 tokens"),
        (
            np.array([20240520, 1, 5000] + [0] * 253, dtype=np.int32).tobytes() + b"\0" * 9998,
            "truncated: its header counts 5000 tokens",
        ),
    ],
    ids=["missing", "empty", "odd bytes", "llm.c truncated"],
)
def test_data_that_cannot_be_read_is_refused(content, reason, tmp_path):
    data = shards(tmp_path)
    path = Path(data["train"])
    path.unlink() if content is None else path.write_bytes(content)
    text = (
        f"schema: 1\nquestion: q\nworkload:\n  gpt:\n    data: {json.dumps(data)}\nablate: {{rht: [true]}}\n"
    )
    (found,) = told(tmp_path, text)
    assert found.startswith("5:5: workload.gpt.data: {")
    assert f"cannot be read: {'' if content is None else path}" in found
    assert reason in found


def test_data_shorter_than_the_context_is_refused(tmp_path):
    (found,) = problems(write(tmp_path, shape={"context": 5000}))
    assert "workload.gpt.context: 5000: 5000 is longer than the text: 2000 tokens" in str(found)


@every(
    values__expected=[
        (
            "{uniform: [2, 1]}",
            "4:24: ablate.workload.lr.uniform: [2, 1]: must be [low, high] with low < high",
        ),
        (
            "{uniform: [1.0, 1.0]}",
            "4:24: ablate.workload.lr.uniform: [1.0, 1.0]: must be [low, high] with low < high",
        ),
        ("{uniform: [0.1]}", "4:24: ablate.workload.lr.uniform: [0.1]: must be [low, high] with low < high"),
        (
            "{uniform: [0.1, .inf]}",
            "4:24: ablate.workload.lr.uniform: [0.1, inf]: must be [low, high] with low < high",
        ),
        (
            "{uniform: ['a', 1]}",
            "4:24: ablate.workload.lr.uniform: ['a', 1]: must be [low, high] with low < high",
        ),
        ("{int: [1, 2.5]}", "4:24: ablate.workload.lr.int: [1, 2.5]: must be [low, high] with low < high"),
        (
            "{int: [0, 4], log: true}",
            "4:37: ablate.workload.lr.log: true: must be true or false, and true only if low > 0",
        ),
        (
            "{int: [1, 4], log: 1}",
            "4:37: ablate.workload.lr.log: 1: must be true or false, and true only if low > 0",
        ),
        ("{uniform: [0.1, 1], step: 2}", "4:43: ablate.workload.lr.step: no such key of a range; "),
        (
            "{unifrm: [0.1, 1]}",
            "4:24: ablate.workload.lr.unifrm: no such key of a range; 'uniform' is the nearest of uniform, ",
        ),
        (
            "{uniform: [0.1, 1], int: [1, 2]}",
            "4:10: ablate.workload.lr: is not a range; write {uniform: [low, high]}, ",
        ),
        ("{choice: []}", "4:24: ablate.workload.lr.choice: []: must be a list of at least one value"),
        ("{choice: 3}", "4:24: ablate.workload.lr.choice: 3: must be a list of at least one value"),
        (
            "{uniform: [-1.0, 1.0]}",
            "4:34: ablate.workload.lr.uniform.0: -1.0: input should be greater than 0",
        ),
        ("{choice: [0.1, -1.0]}", "4:38: ablate.workload.lr.choice.1: -1.0: input should be greater than 0"),
    ]
)
def test_a_bad_range_is_refused(values, expected, tmp_path):
    found = told_of(tmp_path, f"ablate: {{workload.lr: {values}}}\nsearch: {{trials: 3}}")
    assert sum(line.startswith(expected) for line in found) == 1, found


def test_a_wrong_choice_that_another_knob_needs_is_told_once_at_the_choice(tmp_path):
    lines = "ablate: {rht: [true, 7], rht_size: {int: [16, 32], when: {rht: 7}}}\nsearch: {trials: 3}"
    assert [line.partition(": 7")[0] for line in told_of(tmp_path, lines)] == ["4:22: ablate.rht.1"]


def test_a_knob_that_does_not_exist_is_told_once_and_each_wrong_value_by_itself(tmp_path):
    lines = "ablate: {rhtt: [true, false], recipe.fprop.z: [1, 2, 3], workload.lr: [-1, -2]}"
    assert [line.split(": ")[1] for line in told_of(tmp_path, lines)] == [
        "ablate.rhtt",
        "ablate.recipe.fprop.z",
        "ablate.workload.lr.0",
        "ablate.workload.lr.1",
    ]


def test_every_mistake_of_a_file_is_told_at_once_in_the_order_of_its_lines(tmp_path):
    found = told(
        tmp_path,
        """
        schema: 2
        question: ''
        workload: {gpt: {layerz: 2}}
        recipe: nvfp5
        ablate:
          rhtt: [true]
          sr: [maybe]
          cooldown: [0.1, 0.1]
        against: nothing
        seeds: 0
        metric: {direction: down}
        resources: {gpus: 1.5}
        extra: 1
        """,
    )
    places = [tuple(map(int, line.split(":")[:2])) for line in found]
    assert places == sorted(places)
    names = [
        "schema",
        "question",
        "workload.gpt.layerz",
        "recipe",
        "ablate.rhtt",
        "ablate.sr.0",
        "ablate.cooldown.1",
    ]
    names += ["against", "seeds", "metric.direction", "resources", "extra"]
    for name in names:
        assert sum(f": {name}: " in line for line in found) == 1, (name, found)


@pytest.mark.parametrize(
    "lines", ["ablate: {rhtt: [true], sr: []}", "ablate: {recipe.dtype: [fp64], workload.lr: [-1.0]}"]
)
def test_no_mistake_hides_another(lines, tmp_path):
    assert len(told_of(tmp_path, lines)) == 2


def test_missing_keys_are_named(tmp_path):
    found = told(tmp_path, "ablate: {rht: [true]}\n")
    assert sorted(found) == [
        "1:1: question: is missing",
        "1:1: schema: is missing",
        "1:1: workload: is missing",
    ]


HARD = {
    "against a list": {"against": ["bf16"]},
    "a preset that is a list": {"ablate": {"recipe": [["bf16"]]}},
    "a preset that is a mapping": {"ablate": {"recipe": [{"a": 1}]}},
    "a path into a list": {"ablate": {"recipe.schedule.start": ["step:1"]}},
    "a path into a word": {"ablate": {"workload.data.vocab": [64]}, "shape": {"data": "stdlib"}},
    "a metric that no workload records": {"metric": {"name": "val/los"}},
    "a uniform range of a whole number": {
        "ablate": {"workload.batch": {"uniform": [1, 4]}},
        "search": {"trials": 2},
    },
    "choices that stand twice": {"ablate": {"rht": {"choice": [True, True]}}, "search": {"trials": 2}},
    "a question of blanks": {"question": "  "},
}


@pytest.mark.parametrize("case", HARD)
def test_an_odd_value_is_refused_and_not_a_traceback(case, tmp_path):
    assert problems(write(tmp_path, **HARD[case]))


# What a good file expands to


def names(experiment) -> list[tuple[str, str | None]]:
    return [(arm.name, arm.baseline) for arm in experiment.arms]


def ids(experiment) -> dict[str, list[str]]:
    return {
        arm.name: [experiment.spec(arm, seed, "cpu").id for seed in experiment.seeds]
        for arm in experiment.arms
    }


def test_a_grid_is_the_product_in_the_order_of_the_file_with_the_baseline_in_front(tmp_path):
    grid = tiny(tmp_path, ablate={"rht": [True, False], "sr": [False, True]})
    pairs = ["rht=true sr=false", "rht=true sr=true", "rht=false sr=false", "rht=false sr=true"]
    assert names(grid) == [("bf16", None), *((name, "bf16") for name in pairs)]
    assert grid.added == {"bf16"}
    recipe = grid.arms[2].recipe
    assert (recipe.wgrad.hadamard.size, recipe.wgrad.g.rounding, recipe.dgrad.g.rounding) == (
        16,
        "stochastic",
        "stochastic",
    )
    assert grid.arms[3].recipe.wgrad.hadamard is None
    assert grid.arms[0].recipe == PRESETS["bf16"]()


def test_a_knob_with_a_condition_is_left_out_of_the_arms_that_do_not_meet_it(tmp_path):
    knobs = {
        "rht_size": {"choice": [16, 32], "when": {"rht": True}},
        "sr": [True, False],
        "rht": [True, False],
    }
    grid = tiny(tmp_path, ablate=knobs)
    rotated = [{"sr": sr, "rht": True, "rht_size": size} for sr in (True, False) for size in (16, 32)]
    plain = [{"sr": sr, "rht": False} for sr in (True, False)]
    assert sorted(map(str, (arm.knobs for arm in grid.arms[1:]))) == sorted(map(str, rotated + plain))
    assert len({arm.content for arm in grid.arms}) == 7


def test_a_condition_on_a_conditional_knob_needs_both(tmp_path):
    knobs = {
        "rht": [True, False],
        "rht_size": {"choice": [16, 32], "when": {"rht": True}},
        "rht_signs": {"choice": ["fixed", "per_step"], "when": {"rht_size": 32}},
    }
    assert [name for name, _ in names(tiny(tmp_path, ablate=knobs))[1:]] == [
        "rht=true rht_size=16",
        "rht=true rht_size=32 rht_signs=fixed",
        "rht=true rht_size=32 rht_signs=per_step",
        "rht=false",
    ]


@pytest.mark.parametrize("against", ["rht=true", {"rht": True}])
def test_a_baseline_that_is_one_of_the_arms_is_not_run_twice(against, tmp_path):
    grid = tiny(tmp_path, against=against)
    assert names(grid) == [("rht=true", None), ("rht=false", "rht=true")]
    assert grid.added == set()


def test_recipe_files_are_compared_beside_presets(tmp_path):
    """Each is read once, relative to the experiment; an edit of it is another trial."""
    (tmp_path / "own").mkdir()
    mine = tmp_path / "own" / "mine.yaml"
    mine.write_text("{from: mxfp4, wgrad: {g: {rounding: stochastic}}}")
    knobs = {"recipe": ["mxfp4", "own/mine.yaml"], "recipe.layers.skip_first": [0]}
    made = tiny(tmp_path, ablate=knobs, against="bf16")
    (arm,) = (arm for arm in made.arms if "mine.yaml" in arm.name)
    assert (arm.recipe.wgrad.g.rounding, arm.baseline) == ("stochastic", "bf16")
    assert arm.recipe.fprop == PRESETS["mxfp4"]().fprop
    mine.write_text("from: mxfp4_backward")
    again = made.base.arm({"recipe": "own/mine.yaml", "recipe.layers.skip_first": 0})
    assert again.recipe == arm.recipe
    named = tiny(tmp_path, ablate=None, arms={"mine": {"recipe": "own/mine.yaml"}}, against="bf16")
    assert named.arms[-1].recipe == PRESETS["mxfp4_backward"]()
    assert named.spec(named.arms[-1], 0, "cpu").id != made.spec(arm, 0, "cpu").id


def test_presets_are_compared_by_a_list_under_recipe(tmp_path):
    grid = tiny(tmp_path, ablate={"recipe": ["bf16", "nvfp4"]})
    assert names(grid) == [("bf16", None), ("nvfp4", "bf16")]
    assert grid.arms[1].recipe == PRESETS["nvfp4"]()


def test_a_baseline_takes_the_arms_own_workload_values(tmp_path):
    grid = tiny(tmp_path, ablate={"workload.lr": [0.001, 0.01], "rht": [True]})
    assert names(grid) == [
        ("bf16 lr=0.001", None),
        ("bf16 lr=0.01", None),
        ("lr=0.001 rht=true", "bf16 lr=0.001"),
        ("lr=0.01 rht=true", "bf16 lr=0.01"),
    ]
    for arm in grid.arms[2:]:
        (baseline,) = [other for other in grid.arms if other.name == arm.baseline]
        assert baseline.config == arm.config
        assert baseline.recipe == PRESETS["bf16"]()


MUON = {"adamw": {}, "muon": {"workload.optimizer": "muon"}}
TUNED = {"ref": {"recipe": "bf16", "workload.lr": 2e-3}, "fp4": {"workload.lr": 3e-3}}
RATES = {"ablate": {"rht": [True, False], "workload.lr": [0.001, 0.01]}}
NAMED = {
    "an arm of another optimizer": ({"arms": MUON, "against": "adamw"}, [("adamw", None), ("muon", "adamw")]),
    "an arm at its own rate": ({"arms": TUNED, "against": "ref"}, [("ref", None), ("fp4", "ref")]),
    "an arm by its knobs": ({"arms": TUNED, "against": TUNED["ref"]}, [("ref", None), ("fp4", "ref")]),
    "the arm without knobs": ({"arms": MUON, "against": {}}, [("adamw", None), ("muon", "adamw")]),
    "knobs that set the rate of no arm": (
        {"arms": MUON, "against": {"workload.lr": 0.01}},
        [
            ("lr=0.01", None),
            ("lr=0.01 optimizer=muon", None),
            ("adamw", "lr=0.01"),
            ("muon", "lr=0.01 optimizer=muon"),
        ],
    ),
    "one point of a grid of rates": (
        RATES | {"against": "rht=false lr=0.01"},
        [
            *(
                (f"rht={arm}", "rht=false lr=0.01")
                for arm in ("true lr=0.001", "true lr=0.01", "false lr=0.001")
            ),
            ("rht=false lr=0.01", None),
        ],
    ),
    "knobs that leave a grid's rate open": (
        RATES | {"against": {"rht": False}},
        [(f"rht=true lr={rate}", f"rht=false lr={rate}") for rate in (0.001, 0.01)]
        + [(f"rht=false lr={rate}", None) for rate in (0.001, 0.01)],
    ),
    "knobs that set one of a grid's rates": (
        RATES | {"against": {"recipe": "bf16", "workload.lr": 0.01}},
        [
            ("bf16 lr=0.01", None),
            *((f"rht={on} lr={rate}", "bf16 lr=0.01") for on in ("true", "false") for rate in (0.001, 0.01)),
        ],
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_the_baseline_that_a_file_names_is_the_baseline_of_arms_with_other_workload_values(case, tmp_path):
    keys, expected = NAMED[case]
    found = tiny(tmp_path, **({"ablate": None} | keys))
    assert names(found) == expected
    arms = {arm.name: arm for arm in found.arms}
    by_content = {arm.content: arm.name for arm in found.arms}
    assert len(by_content) == len(arms)
    assert all(arm.baseline is None or arms[arm.baseline].baseline is None for arm in found.arms)


def test_a_search_is_compared_with_the_workload_values_that_its_baseline_names(tmp_path):
    space = {"workload.lr": {"uniform": [0.001, 0.1]}, "workload.batch": {"int": [1, 4]}}
    search = {"ablate": space, "search": {"trials": 3}, "against": {"recipe": "bf16", "workload.lr": 0.01}}
    found = tiny(tmp_path, **search)
    arm, baseline = found.propose({"workload.lr": 0.002, "workload.batch": 3})
    assert (baseline.config.lr, baseline.config.batch, baseline.recipe) == (0.01, 3, PRESETS["bf16"]())
    assert (arm.config.lr, arm.baseline) == (0.002, baseline.name)
    assert names(found) == []  # its batch is the arm's
    fixed = tiny(tmp_path, **search | {"ablate": {"workload.lr": space["workload.lr"]}})
    assert names(fixed) == [("bf16 lr=0.01", None)]
    assert fixed.propose({"workload.lr": 0.002})[0].baseline == "bf16 lr=0.01"


def test_a_baseline_that_cannot_be_run_for_an_arm_is_refused_at_its_place(tmp_path):
    lines = "against: {skip_first: 1}\narms: {a: {workload.layers: 1}}"
    (problem,) = told_of(tmp_path, lines)
    assert problem.startswith("4:1: against: ")
    assert "'a'" in problem
    searched = tmp_path / "searched.yaml"
    searched.write_text(
        json.dumps(content(tmp_path, against="nvfp4_paper", search={"trials": 2}))
    )  # of one block
    assert [problem.message.partition(":")[0] for problem in problems(searched)] == ["against"]


def test_arms_are_named_by_the_file(tmp_path):
    listed = tiny(
        tmp_path, ablate=None, arms={"ours": {"sr": False}, "theirs": {"rht": False, "workload.lr": 0.01}}
    )
    assert names(listed) == [
        ("bf16", None),
        ("bf16 lr=0.01", None),
        ("ours", "bf16"),
        ("theirs", "bf16 lr=0.01"),
    ]


SAME_RATE = {"recipe": "bf16", "workload.lr": 0.01}


@every(
    others=[{"other": {}}, {"other": {"workload.lr": 0.01}}, {"plain": {"recipe": "bf16"}}, {}],
    against=["bf16", None],
    knobs=[{"rht": False}, {"recipe": "quartet2", "workload.lr": 0.01}],
)
def test_a_baseline_that_is_a_preset_and_an_arm_of_another_recipe_is_refused_at_the_arm(
    knobs, against, others, tmp_path
):
    (problem,) = problems(write(tmp_path, ablate=None, arms={"bf16": knobs} | others, against=against))
    assert problem.message.startswith("arms.bf16: ")
    assert "preset bf16" in problem.message


@pytest.mark.parametrize(
    ("arms", "expected", "noted"),
    [
        ({"bf16": {"recipe": "bf16"}, "other": {}}, [("bf16", None), ("other", "bf16")], False),
        ({"bf16": SAME_RATE, "other": {"workload.lr": 0.01}}, [("bf16", None), ("other", "bf16")], False),
        (
            {"bf16": {"recipe": "bf16"}, "other": {"workload.lr": 0.01}},
            [("bf16 lr=0.01", None), ("bf16", None), ("other", "bf16 lr=0.01")],
            True,
        ),
    ],
)
def test_an_arm_named_as_the_preset_that_it_is_leaves_each_arm_its_own_workload_values(
    arms, expected, noted, tmp_path
):
    path = write(tmp_path, ablate=None, arms=arms)
    found = load(path)
    assert names(found) == expected
    assert [note.startswith(f"{path}:1:") and "arms.bf16: " in note for note in found.notes] == [True] * noted


def test_an_arm_with_the_baselines_name_must_be_the_baseline(tmp_path):
    arms = {"bf16": {"recipe": "bf16", "workload.lr": 0.01}, "other": {}}
    (problem,) = problems(write(tmp_path, ablate=None, arms=arms))
    assert "arms.bf16: has the name of the baseline, but other contents" in str(problem)


@pytest.mark.parametrize("name", ["", "  ", CONFIRM, f"{CONFIRM}ours"])
def test_a_name_that_no_arm_can_have_is_refused_at_its_place(name, tmp_path):
    (problem,) = told_of(tmp_path, f"arms:\n  a: {{rht: true}}\n  {json.dumps(name)}: {{rht: false}}")
    assert problem.startswith(f"6:3: arms.{name}: arm ")


def test_a_name_that_only_resembles_the_reserved_prefix_is_taken(tmp_path):
    listed = tiny(tmp_path, ablate=None, arms={"confirm": {"rht": True}, "confirmed: x": {"rht": False}})
    assert [name for name, _ in names(listed)] == ["bf16", "confirm", "confirmed: x"]


def test_a_full_path_is_the_same_trial_as_its_short_name(tmp_path):
    short = tiny(
        tmp_path,
        ablate={"sr": [False], "rht": [False], "cooldown": [0.25], "skip_first": [1]},
        shape={"layers": 2},
    )
    paths = {
        "recipe.dgrad.g.rounding": ["nearest"],
        "recipe.wgrad.g.rounding": ["nearest"],
        "recipe.wgrad.hadamard": [None],
    }
    paths |= {
        "recipe.schedule": [[{"start": "fraction:0.75", "slots": "all"}]],
        "recipe.layers.skip_first": [1],
    }
    full = tiny(tmp_path, ablate=paths, shape={"layers": 2})
    assert list(ids(short).values()) == list(ids(full).values())


def test_no_cooldown_is_a_cooldown_of_nothing(tmp_path):
    off, plain = tiny(tmp_path, ablate={"cooldown": [0, 0.5]}), tiny(tmp_path, ablate={"recipe": ["nvfp4"]})
    assert ids(off)["cooldown=0"] == ids(plain)["nvfp4"]
    assert ids(off)["cooldown=0.5"] != ids(plain)["nvfp4"]


def test_seeds_are_a_count_or_a_list(tmp_path):
    assert tiny(tmp_path, seeds=3).seeds == (0, 1, 2)
    assert tiny(tmp_path, seeds=[7, 3]).seeds == (7, 3)


def test_seeds_grow_from_a_start_to_a_most_by_a_step_in_their_order(tmp_path):
    grown = tiny(tmp_path, seeds={"start": 3, "most": 12, "step": 4})
    assert grown.seeds == (0, 1, 2)
    assert [grown.keys.growth.more(count) for count in (3, 7, 11, 12)] == [
        (3, 4, 5, 6),
        (7, 8, 9, 10),
        (11,),
        (),
    ]
    assert tiny(tmp_path, seeds=3).keys.growth is None
    assert ids(grown) == ids(tiny(tmp_path, seeds=3))


@pytest.mark.parametrize(("step", "looks"), [(1, 10), (3, 4), (4, 4), (9, 2), (20, 2)])
def test_a_split_is_over_every_look_that_growth_may_take(step, looks, tmp_path):
    growth = tiny(tmp_path, seeds={"start": 3, "most": 12, "by": "split", "step": step}).keys.growth
    counts = [growth.start]
    while growth.more(counts[-1]):
        counts.append(counts[-1] + len(growth.more(counts[-1])))
    assert (len(counts), counts[-1], growth.interval) == (looks, 12, f"split:{looks}")
    assert tiny(tmp_path, seeds={"start": 3, "most": 12, "by": "sequence"}).keys.growth.interval == "sequence"


def test_a_search_knows_its_ranges_and_runs_its_baseline_first(tmp_path):
    search = tiny(
        tmp_path, ablate={"cooldown": {"uniform": [0, 0.5]}, "rht": [True, False]}, search={"trials": 3}
    )
    assert names(search) == [("bf16", None)]
    assert search.space["cooldown"].ends()[:2] == (0, 0.5)
    assert search.space["rht"].choices == (True, False)
    arm, baseline = search.propose({"cooldown": 0.25, "rht": False})
    assert (arm.baseline, baseline.name) == ("bf16", "bf16")
    assert arm.recipe.schedule[0].start == "fraction:0.75"


def test_a_proposal_that_the_ranks_cannot_share_out_is_refused_as_a_point(tmp_path):
    found = tiny(
        tmp_path,
        shape={"accumulate": 2},
        ablate={"workload.accumulate": {"choice": [2, 3]}},
        search={"trials": 2},
        seeds=1,
        resources={"ranks": 2},
    )
    found.propose({"workload.accumulate": 2})
    with pytest.raises(KnobError, match="resources: 2 ranks share the 3 micro-batches of a step, 2 one each"):
        found.propose({"workload.accumulate": 3, "workload.batch": 1})


def test_a_search_of_the_workload_gives_each_arm_a_baseline_of_its_own(tmp_path):
    search = tiny(
        tmp_path, ablate={"workload.lr": {"uniform": [0.001, 0.01], "log": True}}, search={"trials": 3}
    )
    assert names(search) == []
    arm, baseline = search.propose({"workload.lr": 0.002})
    assert arm.baseline == baseline.name
    assert baseline.config == arm.config


def test_an_arm_does_not_change_the_arms_after_it(tmp_path):
    listed = tiny(tmp_path, ablate=None, arms={"a": {"workload.data.vocab": 128}, "b": {"rht": False}})
    assert {arm.name: arm.config.data.vocab for arm in listed.arms if arm.name in "ab"} == {
        "a": 128,
        "b": VOCAB,
    }


def test_different_arms_have_different_names(tmp_path):
    data = shards(tmp_path / ("long" * 20))
    grid = tiny(tmp_path, ablate={"workload.data": [data, data | {"vocab": 128}]})
    assert len({arm.name for arm in grid.arms}) == len(grid.arms) == 4


# The JSON Schema


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    Draft202012Validator.check_schema(json_schema())
    return Draft202012Validator(json_schema())


@every(path=EXPERIMENTS)
def test_every_experiment_of_this_repository_loads_and_fits_the_schema(path, validator):
    experiment = load(path)
    assert (
        len({experiment.spec(arm, seed, "cpu").id for arm in experiment.arms for seed in experiment.seeds})
        >= 2
    )
    validator.validate(YAML(typ="safe", pure=True).load(path.read_text()))


def test_no_two_experiments_of_this_repository_share_a_name_since_a_sweep_and_its_report_are_named_by_it():
    assert len({path.stem for path in EXPERIMENTS}) == len(EXPERIMENTS) > 15


KEYS = [
    {
        "ablate": {"workload.lr": {"uniform": [0.1, 1.0], "log": True}},
        "search": {"trials": 3, "sampler": "gp", "seed": 1},
    },
    {"ablate": {"recipe.wgrad.hadamard.size": [16, 32], "recipe": ["nvfp4"]}},
    {"ablate": None, "arms": {"a": {"rht": True}}},
    {
        "search": {
            "trials": 3,
            "sampler": "random",
            "pruner": "median",
            "rungs": [2],
            "warm": ["other"],
            "confirm": 5,
        },
        "constraints": [
            {"metric": "nan/activation", "at_most": 0},
            {"metric": "throughput/tokens_per_s", "at_least": 10.5},
        ],
    },
    {"ablate": {"rht": [True, False], "rht_size": {"choice": [16, 32], "when": {"rht": True}}}},
    {
        "ablate": {
            "rht": [True, False],
            "recipe": {"choice": ["nvfp4", "nvfp4_1d_weight"], "when": {"rht": True}},
        }
    },
    {"workload": {"gpt": None}},
    {"seeds": {"start": 2, "most": 5, "by": "split", "step": 2}},
    {"seeds": [1, 5], "retry": 0, "budget": {"trials": 3, "hours": 0.5}, "telemetry": {"every": 5, "log": 1}},
    {
        "metric": {"name": "val/loss", "direction": "maximize", "min_effect": 0.1},
        "against": {"rht": True},
        "engine": "auto",
    },
]


@pytest.mark.parametrize("keys", KEYS)
def test_what_loads_fits_the_schema(keys, tmp_path, validator):
    whole = content(tmp_path, **keys)
    validator.validate(whole)
    assert not problems(write(tmp_path, **keys))


@every(
    wrong=[
        {"extra": 1},
        {"ablate": {"rhtt": [True]}},
        {"ablate": {"rht": True}},
        {"ablate": {"recipe": ["nvfp5"]}},
        {"workload": {"gptt": {}}},
        {"workload": {"command": None}},
        {"ablate": {"recipe": "nvfp4"}},
        {"workload": {"gpt": {"layerz": 1}}},
        {"recipe": "nvfp5"},
        {"schema": 2},
        {"search": {"sampler": "grid", "trials": 1}},
        {"metric": {"direction": "down"}},
        {"budget": {"dollars": 1}},
        {"seeds": 0},
        {"search": {"trials": 2, "pruner": "percentile"}},
        {"search": {"trials": 2, "confirm": 1}},
        {"search": {"trials": 2}, "constraints": [{"at_most": 0}]},
        {"seeds": {"start": 1, "most": 5}},
        {"seeds": {"start": 3, "mots": 5}},
    ]
)
def test_what_the_schema_rejects_does_not_load_either(wrong, tmp_path, validator):
    assert not validator.is_valid(content(tmp_path, **wrong))
    assert problems(write(tmp_path, **wrong))


def test_what_a_file_is_called_and_how_often_it_measures_is_not_what_it_runs(tmp_path):
    plain = tiny(tmp_path)
    other = tiny(
        tmp_path,
        name="other",
        telemetry={"every": 3, "log": 1},
        retry=0,
        question="Another?",
        budget={"trials": 1},
    )
    assert ids(plain) == ids(other)


def test_a_grid_of_a_thousand_arms_is_expanded_within_seconds(tmp_path):
    grid = tiny(
        tmp_path,
        ablate={
            "workload.steps": list(range(1, 31)),
            "rht": [True, False],
            "workload.batch": list(range(1, 11)),
        },
    )
    assert len(grid.arms) == 30 * 2 * 10 + 30 * 10


@pytest.mark.slow
def test_of_thousands_of_wrong_arms_the_first_are_told_and_reading_stops(tmp_path):
    arms = ", ".join(f"a{n}: {{rhtt{n}: true}}" for n in range(9000))
    found = told_of(tmp_path, f"arms: {{{arms}}}")
    assert len(found) == 51
    assert "more problems" in found[-1]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("arms: {" + ", ".join(f"a{n}: {{}}" for n in range(10_001)) + "}", "4:1: arms: "),
        ("ablate: {" + ", ".join(f"k{n}: [1]" for n in range(201)) + "}", "4:1: ablate: "),
        (
            "ablate: {" + ", ".join(f"recipe.k{n}: [1, 2]" for n in range(200)) + "}",
            "4:1: ablate: makes more than 10000 arms",
        ),
        (
            "ablate: {rht: [true, false], workload.lr: ["
            + ", ".join(f"{n}.0" for n in range(1, 99))
            + "]}\nseeds: 10000",
            "5:1: seeds: make ",
        ),
    ],
    ids=["arms", "knobs", "grid", "trials"],
)
def test_what_is_too_large_to_plan_is_refused(lines, expected, tmp_path):
    assert told_of(tmp_path, lines)[0].startswith(expected)


def test_a_list_of_thousands_of_values_is_searched_for_twins_once(tmp_path):
    values = [*range(5000), 7, 7.0, True, [1], [True], {"a": [2]}, {"a": [2]}]
    document = Document(
        "x.yaml", {}, "", {(): (1, 1)} | {("k", index): (2, index + 1) for index in range(len(values))}
    )
    assert [problem.column - 1 for problem in twins(("k",), values, document)] == [5000, 5004, 5006]


def test_the_experiment_is_frozen(tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny(tmp_path).name = "another"
    assert SHAPE["steps"] == 4


ELSEWHERE = {
    "a knob with the workload's name": ({"workload.gpt.lr": [1e-3, 2e-3]}, "write workload.lr"),
    "a path without its root": ({"wgrad.g.rounding": ["nearest"]}, "write recipe.wgrad.g.rounding"),
    "a path without its slot": (
        {"recipe.wgrad.rounding": ["nearest"]},
        "write recipe.wgrad.g.rounding or recipe.wgrad.x.rounding",
    ),
    "a field of weights": ({"recipe.noise": [None]}, "write recipe.weights.noise"),
    "a field of every slot": (
        {"micro_exponents": [[8]]},
        "or recipe.dgrad.g.scale.micro_exponents, or 3 more",
    ),
    "off as 0": ({"weight_noise": [0.0]}, "it takes sigma, or null"),
    "a recipe file that is not there": ({"recipe": ["mine.yaml"]}, "mine.yaml: no such recipe file"),
    "a name that no file can have": ({"recipe": [f"{'m' * 300}.yaml"]}, "mm.yaml: no such recipe file"),
    "a recipe's fields": ({"recipe": [{"from": "mxfp4"}]}, "write its fields to mine.yaml"),
}
WITHIN = {
    "a knob": ({"from": "nvfp4", "sr": False}, "`ablate recipe show nvfp4 --set sr=... --yaml`"),
    "from": ({"form": "nvfp4"}, "'from' is the nearest"),
    "a field of a slot": ({"from": "nvfp4", "rounding": "nearest"}, "write recipe.fprop.x.rounding or "),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_knob_at_a_wrong_place_is_answered_with_the_right_one(name, tmp_path):
    knobs, right = ELSEWHERE[name]
    found = {problem.message for problem in problems(write(tmp_path, ablate=knobs))}
    assert all(right in message for message in found)
    assert found


@pytest.mark.parametrize("name", WITHIN)
def test_a_key_of_a_recipe_at_a_wrong_place_is_answered_with_the_right_one(name, tmp_path):
    recipe, right = WITHIN[name]
    (problem,) = problems(write(tmp_path, recipe=recipe, ablate={"workload.lr": [1e-3, 2e-3]}))
    assert right in problem.message
    assert problem.message.startswith("recipe: ")
    assert not problem.message.startswith("recipe: recipe: ")


def test_a_key_of_the_top_level_in_the_workload_is_sent_there(tmp_path):
    (problem,) = problems(write(tmp_path, shape={"recipe": "nvfp4"}))
    assert problem.message.endswith("no such key here; write recipe at the top level")
