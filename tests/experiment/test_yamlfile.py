"""YAML as plain values with positions: YAML 1.2, duplicates and aliases refused, and never a traceback."""

import sys

import pytest
from support.cases import every

from ablate.errors import InputError, Problem, Reading, nearest, settled
from ablate.experiment.yaml_document import parse, read


def complaints(text: str) -> list[Problem | str]:
    with pytest.raises(InputError) as caught:
        parse(text, "x.yaml")
    return caught.value.problems


@every(
    text__value={
        **{
            "on": "on",
            "yes": "yes",
            "off": "off",
            "true": True,
            "1e-3": 0.001,
            "1.0e-3": 0.001,
            "null": None,
            "~": None,
            "": None,
        },
        **{"012": 12, "0o17": 15, "'1'": "1", "2020-01-01": "2020-01-01", ".5": 0.5, "12:30": "12:30"},
    }.items()
)
def test_scalars_are_read_as_yaml_1_2(text, value):
    found = parse(f"a: {text}", "x").value["a"]
    assert found == value
    assert type(found) is type(value)


def test_every_key_and_item_knows_its_line_and_column():
    document = parse("a: 1\nb:\n  c: [10, 20]\n", "x.yaml")
    assert document.value == {"a": 1, "b": {"c": [10, 20]}}
    assert document.positions["b", "c"] == (3, 3)
    assert document.positions["b", "c", 1] == (3, 11)


def test_a_problem_with_an_absent_key_points_at_the_nearest_thing_that_is_there():
    document = parse("a: 1\nb:\n  c: 2\n", "x.yaml")

    def reading() -> Reading[None]:
        yield document.problem(("b", "missing"), "is missing")
        yield document.problem(("a",), "is odd", 1)

    with pytest.raises(InputError) as caught:
        settled(reading())
    assert [str(p) for p in caught.value.problems] == [
        "x.yaml:1:1: a: 1: is odd",
        "x.yaml:2:1: b.missing: is missing",
    ]


def test_a_duplicate_key_is_named_where_it_stands_the_second_time():
    assert [str(p) for p in complaints("a: 1\nb: 2\na: 3\n")] == ["x.yaml:3:1: a: is given twice"]
    assert [str(p) for p in complaints("a:\n  b: 1\n  b: 1\n")] == ["x.yaml:3:3: b: is given twice"]


def test_a_file_that_names_another_version_of_yaml_is_refused():
    (problem,) = complaints("%YAML 1.1\n---\na: on\nb: 010\n")
    assert "YAML 1.2" in problem.message
    assert parse("%YAML 1.2\n---\na: on\nb: 010\n", "x.yaml").value == {"a": "on", "b": 10}


def test_an_alias_bomb_is_refused_before_it_unfolds():
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(
        f"{this}: &{this} [{', '.join([f'*{last}'] * 9)}]\n"
        for last, this in zip("abcdefghij", "bcdefghijk", strict=True)
    )
    (problem,) = complaints(bomb)
    assert (problem.line, problem.column) == (2, 8)
    assert "aliases are refused" in problem.message


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "a list"),
        ("just words", "a single value"),
        ("null", "a single value"),
    ],
)
def test_what_is_not_a_mapping_is_refused(text, what):
    (problem,) = complaints(text)
    assert problem.message.endswith(f"this file is {what}")


@pytest.mark.parametrize("text", ["a: [1, 2", "a: b: c", "\ta: 1", "a: 'open", "a: 1\n---\nb: 2\n", "%FOO\n"])
def test_what_is_not_yaml_is_refused_with_its_place(text):
    (problem,) = complaints(text)
    assert isinstance(problem, Problem)
    assert problem.line >= 1


@pytest.mark.parametrize(
    "text", ["a: \x00\n", "a: " + "9" * 5000, "a: " + "[" * 600 + "]" * 600], ids=["nul", "digits", "levels"]
)
def test_what_no_reader_can_hold_is_refused_too(text):
    assert complaints(text)


def test_a_nest_is_refused_at_its_level_however_deep_python_may_go():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        (problem,) = complaints("a: " + "[" * 600 + "]" * 600)
    finally:
        sys.setrecursionlimit(before)
    assert "nested more than 64 levels deep" in problem.message


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("schema: 1\nquestion: für wen\n".encode("latin-1"))
    with pytest.raises(InputError) as caught:
        read(path)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (2, 12)
    assert "0xfc" in problem.message


def test_a_folder_or_a_huge_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read: .*directory"):
        read(tmp_path)
    (tmp_path / "huge.yaml").write_text("a: 1\n" + "#" * (1 << 20))
    with pytest.raises(InputError, match="an experiment is at most"):
        read(tmp_path / "huge.yaml")


def test_a_missing_file_names_the_nearest_that_is_there(tmp_path):
    (tmp_path / "rht_sr.yaml").touch()
    (tmp_path / "cooldown.yaml").touch()
    with pytest.raises(
        InputError,
        match=r"rht_rs\.yaml: no such file; 'rht_sr\.yaml' is the nearest of rht_sr\.yaml, cooldown\.yaml",
    ):
        read(tmp_path / "rht_rs.yaml")
    with pytest.raises(InputError, match=r"a\.yaml: no such file$"):
        read(tmp_path / "nowhere" / "a.yaml")


def test_the_nearest_word_comes_first():
    assert nearest("clipp", ["rounding", "clip", "element"]).startswith("'clip' is the nearest of clip, ")
    assert nearest("x", []) == "there is nothing to choose from"


@every(
    text__column=[
        *(
            ("a: !!set {x, y}", 4),
            ("a: !!binary abc", 4),
            ("a: !!timestamp 2020", 4),
            ("a: !!omap [x: 1]", 4),
            ("a: [1, !foo 2]", 8),
        ),
        *(
            ("a: !!python/object/apply:os.system [ls]", 4),
            ("a: !!int {x: 1}", 4),
            ("a: !!map [1]", 4),
            ("!!set a: 1", 1),
        ),
        *(("a: !!bool x", 4), ("a: !!int x", 4), ("a: !!float x", 4)),
        *(("a: 99999999999999999999", 4), ("a: " + "9" * 5000, 4), ("a: 1e400", 4), ("a: -1e400", 4)),
        *(
            ('a: "\\x00"', 4),
            ('a: "\\ud800"', 4),
            ('"\\x00": 1', 1),
            ("ab\x07: 1", 3),
            ("{? {b: 1} : 2}", 4),
            ("{? [b] : 2}", 4),
        ),
        *(("a: &a {b: *a}", 11), ("a: &a [1]\nb: {<<: *a}", 9)),
    ]
)
def test_what_is_no_plain_value_is_refused_at_its_place(text, column):
    problems = complaints(text)
    assert [(type(problem), problem.line, problem.column) for problem in problems] == [
        (Problem, 1 + text.count("\n"), column)
    ]


def test_tags_of_plain_values_and_a_mark_of_byte_order_change_nothing(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: !!str 5\nb: !!int '5'\nc: !!map {d: !!seq [! x]}\n")
    assert read(path).value == {"a": "5", "b": 5, "c": {"d": ["x"]}}


def test_a_merge_key_is_a_key_like_others():
    assert parse("a: {<<: {b: 1}}", "x").value == {"a": {"<<": {"b": 1}}}


def test_of_thousands_of_problems_the_first_are_told_and_how_many_more_there_are():
    text = "".join(f"a{n}: !foo x\n" for n in range(120))
    problems = complaints(text)
    assert [problem.line for problem in problems[:-1]] == list(range(1, 51))
    assert "and 70 more" in problems[-1].message


def test_a_problem_stays_on_one_line():
    document = parse('"a\\nb\\e": 1', "x.yaml")
    assert str(document.problem(("a\nb\x1b",), "is odd")).isprintable()
