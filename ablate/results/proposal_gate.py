"""Gate with a history on disk: judge a proposal of a loop, with all that the loop has judged before.

`proposals.decide` needs to know how many proposals came before, how often this one was looked at, and which
runs are fresh. Here these facts come from the history's file (`ablate.store.proposal_history`), so that a
caller gives names, ids and values alone:

    judged = gate(Path("loop.jsonl"), "warm-up 200", baseline={"b1": 3.21, "b2": 3.19},
                  candidate={"c1": 3.18, "c2": 3.20}, floor=reruns)
    print(judged.word, judged.sentence)

- A run counts once: its id is bound to its first value and its first proposal.
- A proposal counts once: given again, also under another name with the same `content`, it has the decision
  that was made, or continues if that was to run again.
- Runs of the baseline count for the proposal with which they were first given. Others are left out, which
  includes all runs from before a keep, and those of the kept candidate, which luck helped to choose.
- A proposal that was to be run again when another was kept is not continued, since its baseline is gone.
- If more runs are given than a look takes, the hashes of their ids choose: a table that is sorted by its
  values would offer the best ones first.

Not checked: that the runs are those of the configurations that they are said to be, and all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ablate.errors import InputError
from ablate.results.number_text import counted
from ablate.results.proposals import Decision, Floor, History, Plan, Word, decide
from ablate.store.proposal_history import (
    Declaration,
    Judgement,
    ProposalHistory,
    append,
    create,
    locked,
    read,
)


@dataclass(frozen=True)
class Judged:
    """Decision on a proposal, with its place in the history.

    Attributes:
        proposal: Name under which the proposal was first given.
        number: Its number among all proposals of the history, from 1.
        proposals: Number of proposals that were declared.
        decision: The decision.
        repeated: True if nothing new was given, or the proposal was decided before.
        left_out: Ids of given runs of the baseline that belong to other proposals.
        alpha_spent: Probability of a false keep that the whole history has spent.
        token: Digest of the history. A caller who keeps it elsewhere and gives it back with the next proposal
            finds out if the history was replaced.
    """

    proposal: str
    number: int
    proposals: int
    decision: Decision
    repeated: bool
    left_out: tuple[str, ...]
    alpha_spent: float
    token: str

    @property
    def word(self) -> Word:
        """`keep`, `discard` or `run again`."""
        return self.decision.word

    @property
    def sentence(self) -> str:
        """The decision in words, with what was left out."""
        parts = [self.decision.sentence]
        if self.repeated:
            parts.append(f"Nothing new was counted: proposal {self.number} has this decision already.")
        if self.left_out:
            runs = counted(len(self.left_out), "run")
            parts.append(f"{runs} of the baseline left out: made for an earlier proposal.")
        return " ".join(parts)

    def document(self) -> dict[str, Any]:
        """Return everything as JSON, the sentence included."""
        own = {**asdict(self), "decision": self.decision.document(), "left_out": list(self.left_out)}
        return {"word": self.word, "sentence": self.sentence, **own}


def gate(
    history: Path,
    name: str,
    baseline: Mapping[str, float],
    candidate: Mapping[str, float],
    floor: Sequence[float] | None = None,
    minimize: bool | None = None,
    plan: Plan | None = None,
    content: str = "",
    token: str = "",
) -> Judged:
    """Judge a proposal and append the judgement to the history.

    Args:
        history: File of the loop's history. It is begun with the first proposal.
        name: Name of the proposal.
        baseline: Value of each run of the present baseline, by id. Runs that were given before may be given
            again or left out.
        candidate: The same for the candidate. A run that diverged is NaN or infinite.
        floor: Reruns of one configuration, 16 or more. Needed for the first proposal; later only compared.
        minimize: True if smaller values are better. Default: as declared; True for the first proposal.
        plan: What is declared before the first proposal; later only compared.
        content: Digest of the change itself. It recognises a proposal under another name.
        token: Token of any earlier judgement of this history.

    Raises:
        InputError: the history was changed, something differs from what was declared, a run has two values
            or two proposals, more proposals than declared, or values that `decide` refuses.
    """
    with locked(history):
        past = read(history)
        if past is None and token:
            raise InputError(f"{history}: there is no history, and a token of one was given: restore it")
        if past is not None and token and token not in past.digests:
            raise InputError(
                f"{history}: the token {token[:12]} is not of this history: it was replaced or shortened"
            )
        declared = _declaration(history, past, floor, minimize, plan)
        judgements = past.judgements if past else ()
        own = _same(judgements, name, content)
        proposal = own[0].proposal if own else name
        others = [each for each in judgements if each.proposal != proposal]
        names = list(dict.fromkeys([*(each.proposal for each in judgements), proposal]))
        recorded = Decision.parse(own[-1].decision) if own else None
        spent = sum(each.decision["alpha"] for each in judgements)
        place = (proposal, names.index(proposal) + 1, int(declared.plan["proposals"]))
        if past and recorded and recorded.word != "run again":
            return Judged(*place, recorded, True, (), spent, past.token)
        if own and any(each.decision["word"] == "keep" for each in judgements[judgements.index(own[0]) :]):
            raise InputError(
                f"proposal {proposal!r} was to be run again, and another was kept since: its baseline is"
                " not the present one. Propose it under another name, on top of what was kept"
            )
        baseline, candidate = (
            {str(run): value for run, value in runs.items()} for runs in (baseline, candidate)
        )
        foreign = {run for each in others for run in (*each.candidate, *each.baseline)}
        left_out = tuple(run for run in baseline if run in foreign)
        theirs = _merged("baseline", own, {run: baseline[run] for run in baseline if run not in foreign})
        ours = _merged("candidate", own, candidate)
        if shared := [run for run in ours if run in theirs]:
            raise InputError(f"run {shared[0]!r} is given both as the candidate's and as the baseline's")
        if used := [run for run in ours if run in foreign]:
            why = f"run {used[0]!r} was given with another proposal"
            raise InputError(f"{why}: it cannot be one of {proposal!r}")
        seen = {run for each in own for run in (*each.candidate, *each.baseline)}
        new_ours, new_theirs = (
            {run: value for run, value in runs.items() if run not in seen} for runs in (ours, theirs)
        )
        if past and recorded and not new_ours and not new_theirs:
            return Judged(*place, recorded, True, left_out, spent, past.token)
        earlier = History(
            proposals=place[1] - 1,
            looks=recorded.looks if recorded else 0,
            baselines=[
                [value for each in others if each.proposal == other for value in each.baseline.values()]
                for other in names
                if other != proposal
            ],
        )
        decision = decide(
            Floor.of(declared.floor),
            list(theirs.values()),
            list(ours.values()),
            earlier,
            Plan(**declared.plan),  # type: ignore[arg-type]
            declared.minimize,
        )
        past = past or create(history, declared)
        judgement = Judgement(proposal, content, new_ours, new_theirs, decision.document())
        past = append(history, past, judgement)
        return Judged(*place, decision, False, left_out, spent + decision.alpha, past.token)


def _declaration(
    path: Path,
    past: ProposalHistory | None,
    floor: Sequence[float] | None,
    minimize: bool | None,
    plan: Plan | None,
) -> Declaration:
    """Return what a history declares, or what begins it; InputError if the arguments differ from it."""
    if past is None:
        if floor is None:
            raise InputError(
                f"{path}: a new history needs a noise floor: 16 or more reruns of one configuration"
            )
        return Declaration(asdict(plan or Plan()), minimize is not False, [float(value) for value in floor])
    declared = past.declaration
    problems = []
    if floor is not None and list(floor) != list(declared.floor):
        problems.append(
            f"{path}: the noise floor differs from the declared one ({len(declared.floor)} reruns)"
        )
    if minimize is not None and minimize != declared.minimize:
        better = "smaller" if declared.minimize else "larger"
        problems.append(f"{path}: it is declared that {better} values are better")
    for key, value in asdict(plan).items() if plan else ():
        if declared.plan[key] != value:
            problems.append(f"{path}: {key} is declared as {declared.plan[key]}, not {value}")
    if problems:
        raise InputError(*problems, "what was declared before the first proposal holds for the whole history")
    return declared


def _same(judgements: Sequence[Judgement], name: str, content: str) -> list[Judgement]:
    """Return the judgements of the proposal with the same content, or the same name; InputError without a
    name."""
    if not name:
        raise InputError("a proposal needs a name")
    by_content = [each.proposal for each in judgements if content and each.content == content]
    wanted = by_content[0] if by_content else name
    own = [each for each in judgements if each.proposal == wanted]
    if not by_content and content and any(each.content not in ("", content) for each in own):
        raise InputError(
            f"proposal {name!r} was judged with another content: give the new change another name"
        )
    return own


def _merged(side: str, own: Sequence[Judgement], given: Mapping[str, float]) -> dict[str, float]:
    """Return a proposal's runs by call and hash of the id; InputError if a value changed."""
    merged = {run: value for each in own for run, value in _shuffled(getattr(each, side)).items()}
    for run, value in given.items():
        if run in merged and repr(merged[run]) != repr(float(value)):
            raise InputError(
                f"run {run!r} of the {side} has two values: {merged[run]!r} before, {float(value)!r} now"
            )
    return merged | {run: float(value) for run, value in _shuffled(given).items()}


def _shuffled(runs: Mapping[str, float]) -> dict[str, float]:
    """Return runs in an order that depends on their ids alone."""
    return {run: runs[run] for run in sorted(runs, key=lambda run: sha256(run.encode()).digest())}
