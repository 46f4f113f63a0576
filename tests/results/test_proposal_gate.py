"""Gate with a history on disk: what counts once, what is refused, and which changes of the history are found."""

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from ablate.errors import InputError
from ablate.files import read_json
from ablate.results.proposal_gate import Judged, gate
from ablate.results.proposals import Floor, History, Plan, decide
from ablate.store.proposal_history import read

NOISE, LEVEL = 0.01, 3.2


class Loop:
    """A loop of proposals: makes the runs that the gate asks for, with an id each."""

    def __init__(self, folder: Path, seed: int = 0, **declared: Any) -> None:
        self.path, self.random, self.declared, self.made = (
            folder / "loop.jsonl",
            random.Random(seed),
            declared,
            0,
        )
        self.floor = [self.random.gauss(LEVEL, NOISE) for _ in range(16)]

    def runs(self, count: int, gain: float = 0.0) -> dict[str, float]:
        """Return new runs, better by `gain` noise floors."""
        start, self.made = self.made, self.made + count
        return {f"r{start + n}": self.random.gauss(LEVEL - gain * NOISE, NOISE) for n in range(count)}

    def judge(
        self, name: str, baseline: dict[str, float], candidate: dict[str, float], **more: Any
    ) -> Judged:
        """Call the gate."""
        return gate(self.path, name, baseline, candidate, **{"floor": self.floor, **self.declared, **more})

    def propose(self, name: str, gain: float = 0.0) -> Judged:
        """Judge a proposal until it is decided, with new runs only in each call."""
        judged = self.judge(name, self.runs(2), self.runs(2, gain))
        while judged.word == "run again":
            more = judged.decision
            judged = self.judge(name, self.runs(more.runs_baseline), self.runs(more.runs_candidate, gain))
        return judged

    def lines(self) -> list[dict[str, Any]]:
        """Return the history's lines."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def loop(tmp_path) -> Loop:
    return Loop(tmp_path)


@pytest.fixture
def judged(loop) -> Loop:
    """A loop with several judgements, one of them a keep."""
    assert [loop.propose(f"p{n}", gain).word for n, gain in enumerate([0, 6, 0])] == [
        "discard",
        "keep",
        "discard",
    ]
    assert len(loop.lines()) > 4
    return loop


def test_a_loop_is_judged_as_by_decide(loop):
    """The same runs, with the facts of the history counted by hand."""
    baselines = []
    for number, gain in enumerate([0, 0, 2, 6, 1, 0, 0]):
        base, ours, looks = loop.runs(2), loop.runs(2, gain), 0
        while True:
            got = loop.judge(f"p{number}", base, ours)
            told = decide(
                Floor.of(loop.floor),
                [*base.values()],
                [*ours.values()],
                History(number, looks, baselines),
            )
            assert (got.decision, got.number, got.repeated) == (told, number + 1, False)
            if told.word != "run again":
                break
            looks = told.looks
            base |= loop.runs(told.runs_baseline)  # all runs are given again
            ours |= loop.runs(told.runs_candidate, gain)
        baselines.append([*base.values()])
    assert len(loop.lines()) == 1 + sum(1 for line in loop.lines() if "proposal" in line)


def test_the_alpha_of_all_looks_is_counted(judged):
    spent = sum(line["decision"]["alpha"] for line in judged.lines()[1:])
    again = judged.judge("p0", {}, {})
    more = judged.judge("p9", judged.runs(4), judged.runs(4, -9))
    assert more.alpha_spent == pytest.approx(spent + more.decision.alpha, rel=1e-9)
    assert more.decision.alpha > 0
    assert again.alpha_spent == pytest.approx(spent)
    assert 0 < spent < 0.05 * 3 / 50
    assert again.document()["alpha_spent"] == again.alpha_spent


def test_a_decided_proposal_keeps_its_decision_and_counts_once(judged):
    before = judged.path.read_bytes()
    again = judged.judge("p0", judged.runs(16), judged.runs(16, 40))
    assert (again.word, again.repeated, again.number) == ("discard", True, 1)
    assert judged.path.read_bytes() == before
    assert judged.judge("new", {}, {}).number == 4


def test_the_same_change_under_another_name_counts_once(loop):
    first = loop.judge("a", loop.runs(4), loop.runs(4, 40), content="c0ffee")
    again = loop.judge("b", loop.runs(4), loop.runs(4, 40), content="c0ffee")
    assert (again.proposal, again.decision, again.repeated) == ("a", first.decision, True)
    assert loop.judge("b", {}, {}, content="other").number == 2
    assert loop.judge("b", loop.runs(1), {}).number == loop.judge("c", {}, {}, content="other").number == 2
    with pytest.raises(InputError, match="another content"):
        loop.judge("a", {}, {}, content="other2")


def test_a_call_without_new_runs_is_no_look(loop):
    base, ours = loop.runs(2), loop.runs(2, 3)
    first = loop.judge("a", base, ours)
    assert first.word == "run again"
    assert loop.judge("a", {}, {}).decision == first.decision
    again = loop.judge("a", base, ours)
    assert (again.repeated, again.decision, len(loop.lines())) == (True, first.decision, 2)
    one = loop.judge("a", loop.runs(1), {})
    assert (one.decision.reason, one.decision.alpha, one.decision.looks) == ("too few runs", 0, 1)
    assert (one.decision.runs_candidate, one.decision.runs_baseline) == (2, 1)


def test_the_order_in_which_runs_are_given_chooses_none_of_them(tmp_path):
    """Six runs of each for a look that takes four; sorted, the best of one side would meet the worst of the other."""
    differ = 0
    for seed in range(20):
        loop = Loop(tmp_path, seed)
        base, ours = loop.runs(6), loop.runs(6)
        worst = dict(sorted(base.items(), key=lambda run: -run[1]))
        best = dict(sorted(ours.items(), key=lambda run: run[1]))
        loop.path = tmp_path / f"{seed}"
        got = loop.judge("a", base, ours).decision
        loop.path = tmp_path / f"{seed} sorted"
        assert loop.judge("a", worst, best).decision == got
        assert got.evidence.runs == 4
        differ += got != decide(Floor.of(loop.floor), [*worst.values()], [*best.values()])
    assert differ == 20


def test_runs_of_the_baseline_count_for_one_proposal(loop):
    base = loop.runs(4)
    loop.judge("a", base, loop.runs(4))
    got = loop.judge("b", base, loop.runs(4))
    assert got.left_out == tuple(base)
    assert (got.word, got.decision.reason, got.decision.runs_baseline) == ("run again", "too few runs", 2)
    assert "left out" in got.sentence


def test_runs_of_a_kept_candidate_are_no_baseline(loop):
    lucky = loop.runs(4, 40)
    assert loop.judge("a", loop.runs(4), lucky).word == "keep"
    got = loop.judge("b", lucky, loop.runs(4, 40))
    assert (got.left_out, got.decision.runs_baseline) == (tuple(lucky), 2)


def test_an_open_proposal_is_not_continued_after_a_keep(loop):
    assert loop.judge("open", loop.runs(1), loop.runs(1)).word == "run again"
    assert loop.propose("kept", 40).word == "keep"
    with pytest.raises(InputError, match="another was kept"):
        loop.judge("open", loop.runs(4), loop.runs(4))
    assert loop.judge("open, on top of it", loop.runs(1), loop.runs(1)).number == 3


def test_a_diverged_candidate_is_discarded_and_recorded_as_text(loop):
    got = loop.judge("a", loop.runs(2), {"bad": math.nan, "worse": math.inf})
    assert (got.word, got.decision.reason) == ("discard", "diverged")
    assert loop.lines()[1]["candidate"] == {"bad": "nan", "worse": "inf"}
    assert [*read(loop.path).judgements[0].candidate.values()][1] == math.inf
    assert loop.judge("a", {}, {}).repeated


def test_larger_values_can_be_better(tmp_path):
    loop = Loop(tmp_path, minimize=False)
    assert loop.judge("worse", loop.runs(4), loop.runs(4, 40)).word == "discard"
    assert loop.judge("better", loop.runs(4), loop.runs(4, -40)).word == "keep"


def test_a_document_is_json_and_has_the_sentence(judged):
    for name in ("p0", "p1", "new"):
        got = judged.judge(name, {}, {})
        document = json.loads(json.dumps(got.document(), allow_nan=False))
        assert document["sentence"] == got.sentence
        assert document["word"] == got.word
        assert document["decision"]["runs_baseline"] == got.decision.runs_baseline
        assert document["token"] == got.token == read(judged.path).token


def test_the_declaration_is_needed_once(judged):
    assert judged.judge("more", judged.runs(2), judged.runs(2), floor=None).number == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"floor": [LEVEL + n for n in range(16)]}, "noise floor differs"),
        ({"minimize": False}, "smaller values"),
        ({"plan": Plan(proposals=500)}, "proposals is declared as 50"),
        ({"plan": Plan(alpha=0.5)}, "alpha is declared"),
        ({"plan": Plan(effect=1.0)}, "effect is declared"),
        ({"plan": Plan(most=8)}, "most is declared"),
        ({"token": "f" * 64}, "token"),
    ],
)
def test_what_differs_from_the_declaration_is_refused(change, words, judged):
    before = judged.path.read_bytes()
    with pytest.raises(InputError, match=words):
        judged.judge("more", judged.runs(2), judged.runs(2), **change)
    assert judged.path.read_bytes() == before


@pytest.mark.parametrize(
    ("baseline", "candidate", "words"),
    [
        ({"x": 3.2, "y": 3.2}, {"x": 3.1, "z": 3.1}, "both"),
        ({"y": 3.2}, {"r0": 3.1}, "another proposal"),
        ({"y": math.nan}, {"z": 3.1}, "baseline"),
    ],
)
def test_runs_that_cannot_be_judged_are_refused(baseline, candidate, words, judged):
    with pytest.raises(InputError, match=words):
        judged.judge("more", baseline, candidate)
    assert len(read(judged.path).judgements) == len(judged.lines()) - 1


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_run_has_one_value(side, loop):
    runs = {"baseline": loop.runs(1), "candidate": loop.runs(1)}
    loop.judge("a", **runs)
    changed = {run: value + 1e-9 for run, value in runs[side].items()}
    with pytest.raises(InputError, match="two values"):
        loop.judge("a", **{**runs, side: changed})


def test_a_new_history_needs_a_floor_and_a_name(loop):
    with pytest.raises(InputError, match="needs a noise floor"):
        loop.judge("a", {}, {}, floor=None)
    with pytest.raises(InputError, match="16 or more"):
        loop.judge("a", {}, {}, floor=[3.0, 3.1])
    with pytest.raises(InputError, match="name"):
        loop.judge("", {}, {})
    with pytest.raises(InputError, match="no history"):
        loop.judge("a", {}, {}, token="f" * 64)
    with pytest.raises(InputError, match="folder"):
        gate(loop.path.parent, "a", {}, {}, loop.floor)
    assert not loop.path.exists()


def test_more_proposals_than_declared_are_refused_but_open_ones_continue(tmp_path):
    loop = Loop(tmp_path, plan=Plan(proposals=2))
    loop.judge("a", loop.runs(1), loop.runs(1))
    loop.propose("b")
    with pytest.raises(InputError, match="2 proposals were declared"):
        loop.judge("c", loop.runs(2), loop.runs(2))
    assert not loop.judge("a", loop.runs(3), loop.runs(3)).repeated


# --- changes of the history -------------------------------------------------------------------------


def rewritten(lines: list[dict[str, Any]]) -> str:
    """Return the text of these lines with digests that fit, computed independently."""
    text, previous = "", ""
    for line in lines:
        content = {key: value for key, value in line.items() if key not in ("previous", "digest")}
        canonical = json.dumps([previous, content], sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text += json.dumps({**content, "previous": previous, "digest": digest}) + "\n"
        previous = digest
    return text


def edited(text: str) -> str:
    lines = [json.loads(line) for line in text.splitlines()]
    lines[2]["decision"]["word"] = "discard"
    lines[2]["decision"]["runs_candidate"] += 1
    return "".join(json.dumps(line) + "\n" for line in lines)


def swapped(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:1], lines[2], lines[1], *lines[3:]])


CHANGES = {
    "a link edited": lambda text: text.replace('"previous": "', '"previous": "0', 2),
    "a value edited": edited,
    "two lines swapped": swapped,
    "a line in the middle removed": lambda text: "".join(
        line for n, line in enumerate(text.splitlines(keepends=True)) if n != 2
    ),
    "the declaration removed": lambda text: "".join(text.splitlines(keepends=True)[1:]),
    "the last line removed": lambda text: "".join(text.splitlines(keepends=True)[:-1]),
    "all but the declaration removed": lambda text: text.splitlines(keepends=True)[0],
    "emptied": lambda _: "",
    "the last line torn": lambda text: text[:-20],
    "text appended": lambda text: text + "note\n",
    "a list appended": lambda text: text + "[]\n",
    "the last line twice": lambda text: text + text.splitlines(keepends=True)[-1],
    "shortened by one, digests that fit": lambda text: rewritten(
        [json.loads(x) for x in text.splitlines()[:-1]]
    ),
    "edited, digests that fit": lambda text: rewritten([json.loads(x) for x in edited(text).splitlines()]),
    "two appended, digests that fit": lambda text: rewritten(
        [json.loads(x) for x in (*text.splitlines(), text.splitlines()[-1], text.splitlines()[-1])]
    ),
}
"""Changes of a history whose head stays, by name."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_history_is_refused(change, judged):
    text = judged.path.read_text()
    assert rewritten(judged.lines()) == text  # the digests are what the page says
    judged.path.write_text(CHANGES[change](text))
    with pytest.raises(InputError, match=r"loop\.jsonl"):
        judged.judge("more", judged.runs(2), judged.runs(2))


def test_any_changed_byte_is_found(judged):
    """Only a change that JSON does not see (spaces) may pass."""
    source, whole = random.Random(3), judged.path.read_bytes()
    parsed = read(judged.path)
    for _ in range(300):
        place = source.randrange(len(whole))
        judged.path.write_bytes(whole[:place] + bytes([source.randrange(32, 127)]) + whole[place + 1 :])
        try:
            assert read(judged.path) == parsed
        except InputError:
            continue


@pytest.mark.parametrize(
    "head", [None, "", "[]", "{}", '{"lines": 0, "digest": ""}', '{"lines": "2", "digest": "a"}']
)
def test_a_head_that_is_missing_or_damaged_is_refused(head, judged):
    path = judged.path.with_name("loop.jsonl.head")
    path.unlink() if head is None else path.write_text(head)
    with pytest.raises(InputError, match=r"loop\.jsonl\.head"):
        judged.judge("more", judged.runs(2), judged.runs(2))


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_history_is_refused_whatever_its_head_counts(content, judged):
    judged.path.write_text(content)
    for lines in (2, 1, 0, -1, True, False):
        judged.path.with_name("loop.jsonl.head").write_text(json.dumps({"lines": lines, "digest": "a"}))
        with pytest.raises(InputError, match=r"loop\.jsonl"):
            judged.judge("more", judged.runs(2), judged.runs(2))


def test_a_deleted_history_is_refused(judged):
    judged.path.unlink()
    with pytest.raises(InputError, match="missing"):
        judged.judge("more", judged.runs(2), judged.runs(2))


def test_older_copies_of_both_files_are_found_by_a_token_alone(judged):
    head = judged.path.with_name("loop.jsonl.head")
    old = judged.path.read_bytes(), head.read_bytes()
    seen = judged.judge("more", judged.runs(2), judged.runs(2)).token
    assert judged.judge("more", {}, {}, token=seen).token == seen
    judged.path.write_bytes(old[0])
    head.write_bytes(old[1])
    with pytest.raises(InputError, match="token"):
        judged.judge("last", judged.runs(2), judged.runs(2), token=seen)
    assert not judged.judge("last", judged.runs(2), judged.runs(2)).repeated


def test_a_token_of_any_earlier_judgement_holds(judged):
    for token in read(judged.path).digests:
        judged.judge("p0", {}, {}, token=token)


@pytest.mark.parametrize("name", ["loop.jsonl", "loop.jsonl.head"])
def test_a_process_that_ends_between_two_writes_leaves_a_history_that_continues(name, loop, monkeypatch):
    """The end is simulated at each rename in turn: the old file stays."""
    replace = Path.replace
    for step in range(6):
        ended = []

        def end(self, target, step=step, ended=ended):
            if Path(target).name == name and not ended:
                ended.append(step)
                raise KeyboardInterrupt
            return replace(self, target)

        base, ours = loop.runs(2), loop.runs(2)
        monkeypatch.setattr(Path, "replace", end)
        with pytest.raises(KeyboardInterrupt):
            loop.judge(f"p{step}", base, ours)
        monkeypatch.setattr(Path, "replace", replace)
        got = loop.judge(f"p{step}", base, ours)
        assert got.number == step + 1
        assert len(read(loop.path).judgements) == step + 1
        assert read_json(loop.path.with_name("loop.jsonl.head"))["lines"] >= step + 1
