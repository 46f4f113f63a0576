"""Runs of a proposal, of its baseline and of a noise floor, handed to the gate of a loop."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ablate.cache import key_of
from ablate.errors import InputError
from ablate.judging.chosen_runs import Question, prepared
from ablate.judging.run import ForeignRun
from ablate.results.number_text import counted
from ablate.results.proposal_gate import Judged, gate
from ablate.results.proposals import Plan
from ablate.store.proposal_history import read


def gate_runs(
    runs: Sequence[ForeignRun],
    question: Question,
    history: Path,
    floor: str | None,
    proposals: int | None,
    token: str = "",
    proposal: str = "",
) -> tuple[Judged, list[str]]:
    """Judge the one arm that is neither the baseline nor the noise floor, and say which runs were left out.

    Each run counts by the last value of the metric. Without a floor, the history has its values; without a
    number of proposals, it is as declared, 50 at the start; without a name, the proposal has that of its arm.
    InputError if there is not one candidate, the runs end at different steps, or the gate refuses them.
    """
    if question.min_effect is not None:
        raise InputError("--min-effect: a gate counts in noise floors; leave it out")
    if question.at is not None:
        raise InputError("--at: a gate compares runs of one length; leave it out")
    chosen, said = prepared(runs, question)
    name = chosen.metric.name
    ends = sorted({max(run.records[name]) for run in chosen.runs})
    if len(ends) > 1:
        raise InputError(f"the runs end at steps {ends[0]} and {ends[-1]}: compare runs of one length")
    values: dict[str, dict[str, float]] = {}
    names: Counter[str] = Counter()
    for run in chosen.runs:
        identity = _identity(run)
        names[identity] += 1
        again = f" ({names[identity]})" if names[identity] > 1 else ""
        values.setdefault(run.arm, {})[identity + again] = run.records[name][ends[0]]
    if floor is not None and floor not in values and not history.exists():
        raise InputError(f"--floor {floor}: no such arm among {', '.join(values)}")
    reruns = [*values.pop(floor).values()] if floor in values else None
    baseline = values.pop(question.against, None)
    if baseline is None:
        raise InputError(f"--against {question.against}: the noise floor cannot be the baseline, too")
    if len(values) != 1:
        found = ", ".join(values) or "none"
        others = f"beside baseline and floor there are {found}"
        raise InputError(f"a gate judges one proposal; {others}: give only the rows of one")
    ((arm, candidate),) = values.items()
    plan = None if proposals is None else Plan(proposals=proposals)
    minimize = chosen.metric.direction == "minimize"
    judged = gate(history, proposal or arm, baseline, candidate, reruns, minimize, plan, token=token)
    _refuse_another(judged, history, candidate)
    said.append(f"{counted(len(candidate), 'run')} of {arm}, {len(baseline)} of {question.against}")
    return judged, said


def _refuse_another(judged: Judged, history: Path, candidate: Mapping[str, float]) -> None:
    """Raise InputError for new runs of a decided proposal: they change nothing, or are of another."""
    past = read(history)
    if not judged.repeated or judged.word == "run again" or past is None:
        return
    own = [each.candidate for each in past.judgements if each.proposal == judged.proposal]
    known = {run for runs in own for run in runs}
    if new := next((run for run in candidate if run not in known), None):
        raise InputError(
            f"{judged.proposal} was decided as proposal {judged.number} ({judged.word}), and {new} is"
            " new: more runs change nothing; give the new proposal another name with --as"
        )


def _identity(run: ForeignRun) -> str:
    """Return a name of a run that it has in any other file, and under any other arm, too.

    A run of few values may equal another by chance, so its arm counts as well.
    """
    records = [[name, sorted(steps.items())] for name, steps in sorted(run.records.items())]
    parts = [run.arm] * (not run.telling) + [f"seed {run.seed}"] * (run.seed is not None)
    return ", ".join([*parts, f"records {key_of(records)[:12]}"])
