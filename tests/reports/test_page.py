"""Parts of a page as HTML and as Markdown: what is written is escaped, what is empty is left out, what can be sorted has its key."""

import base64
import csv
import re
from html.parser import HTMLParser

import pytest

from ablate.reports.page import Code, Gallery, Section, Text, section
from ablate.reports.table import Table

ROWS = [
    {"arm": "a <b> | c", "gap": ("+0.10", 0.1), "note": "-", "verdict": "worse"},
    {"arm": "`knob`", "gap": ("-2.00", -2.0), "note": "", "verdict": "better (on 3 fresh seeds)"},
    {"arm": "base", "verdict": "baseline"},
]


class Cells(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows, self.keys, self.classes = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "tr":
            self.rows.append([])
            self.classes.append(found.get("class"))
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.keys.append(found.get("data-sort"))

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-0.5 to +2e-05, (-1.5e-3)", "−0.5 to +2e−05, (−1.5e−3)"),
        (
            "lr=-1e-3 `--at -1` of 2026-11-27, log-1.txt",
            "lr=-1e-3 <code>--at -1</code> of 2026-11-27, log-1.txt",
        ),
    ],
    ids=["numbers", "names, code and dates"],
)
def test_negative_numbers_have_a_minus_sign(text, shown):
    assert Text(text).html() == f"<p>{shown}</p>"


def test_a_table_shows_every_cell_as_it_is_and_numbers_sort_by_value():
    cells = Cells(Table.of("t", ROWS, "", ["worse", "better", "baseline"]).html())
    assert cells.rows[0] == ["arm", "gap", "verdict"]  # no row has a note
    assert cells.rows[1] == ["a <b> | c", "+0.10", "worse"]
    assert [key for key in cells.keys if key] == ["0.1", "-2.0"]
    assert cells.classes[1:] == ["worse", "better", "baseline"]


def test_in_markdown_a_bar_in_a_cell_ends_no_cell():
    lines = Table.of("t", ROWS, "Said below.").markdown().splitlines()
    assert lines[:3] == [
        "| arm | gap | verdict |",
        "| --- | ---: | --- |",
        "| a &lt;b> \\| c | +0.10 | worse |",
    ]
    assert lines[-1] == "Said below."


class CountedRow(dict):
    """Row that counts how often its names are read."""

    reads = 0

    def __iter__(self):
        CountedRow.reads += 1
        return super().__iter__()


def test_the_names_of_a_long_tables_columns_are_read_once(tmp_path):
    table = Table.of("t", [CountedRow({"arm": str(n), "gap": ("0", 0.0)}) for n in range(50)])
    table.html(), table.markdown(), table.save(tmp_path)
    assert CountedRow.reads == 50


def test_a_table_is_saved_as_csv(tmp_path):
    Table.of("t", ROWS).save(tmp_path / "new")
    rows = list(csv.reader((tmp_path / "new" / "t.csv").read_text().splitlines()))
    assert rows[1] == ["a <b> | c", "+0.10", "worse"]
    assert len(rows) == 4


def test_notes_are_numbered_under_the_table_equal_ones_once_and_the_csv_has_them_by_row(tmp_path):
    table = Table.of("t", ROWS, "Said below.", notes=[["a <note>", "b"], [], ["b"]])
    cells = Cells(table.html())
    assert [row[-1] for row in cells.rows[1:]] == ["worse¹ ²", "better (on 3 fresh seeds)", "baseline²"]
    assert "<caption>¹ a &lt;note&gt;<br>² b<br>Said below.</caption>" in table.html()
    assert table.markdown().splitlines()[-4:] == ["¹ a &lt;note>  ", "² b", "", "Said below."]
    table.save(tmp_path)
    rows = list(csv.reader((tmp_path / "t.csv").read_text().splitlines()))
    assert [row[-2:] for row in rows] == [
        ["verdict", "notes"],
        ["worse", "a <note>; b"],
        ["better (on 3 fresh seeds)", ""],
        ["baseline", "b"],
    ]


def test_a_section_of_nothing_is_nothing_and_parts_that_are_not_there_are_left_out():
    assert (section("Title", None, []).html(), section("Title", None).markdown()) == ("", "")
    found = section("Title", None, Text("one & two"), [Text("three")])
    assert found.html() == '<h2 id="title">Title</h2>\n<p>one &amp; two</p>\n<p>three</p>'
    assert found.markdown() == "## Title\n\none & two\n\nthree"
    assert "<details>" in Section("T", [Text("x")], folded=True).html()


def test_code_and_bold_are_kept_and_nothing_else_is_markup():
    assert Text("**No** `x<y` <script>").html() == "<p><b>No</b> <code>x&lt;y</code> &lt;script&gt;</p>"


def test_a_gallery_holds_its_pictures_and_links_copies_of_them(tmp_path):
    titles = ("a <b> | c", "a b c", 'rht="true" mask_ratio=0.5')
    for number, _ in enumerate(titles):
        (tmp_path / f"{number}.png").write_bytes(bytes([number]) * 100)
    gallery = Gallery("left", [(title, tmp_path / f"{number}.png") for number, title in enumerate(titles)])
    found = gallery.html()
    assert re.findall(r"<figcaption>(.*?)</figcaption>", found) == [
        "a &lt;b&gt; | c",
        "a b c",
        'rht="true" mask_ratio=0.5',
    ]
    inside = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]+)">', found)
    assert [base64.b64decode(content)[:1] for _, content in inside] == [b"\0", b"\1", b"\2"]
    assert inside[2][0] == "rht=&quot;true&quot; mask_ratio=0.5"
    gallery.save(tmp_path / "out" / "figures")
    lines = gallery.markdown().splitlines()
    assert lines[0] == '| a &lt;b> \\| c | a b c | rht="true" mask_ratio=0.5 |'
    linked = re.findall(r"!\[\]\(([^)]+)\)", lines[2])
    assert [(tmp_path / "out" / link).read_bytes()[:1] for link in linked] == [b"\0", b"\1", b"\2"]


def test_a_copy_of_a_picture_has_a_name_that_a_file_system_takes(tmp_path):
    (tmp_path / "x.png").write_bytes(b"x")
    titles = ("lr=0.001 " * 40, "模" * 100, "模" * 99)
    gallery = Gallery("weights" * 30, [(title, tmp_path / "x.png") for title in titles])
    gallery.save(tmp_path / "figures")
    assert len([*(tmp_path / "figures").iterdir()]) == len(titles)


@pytest.mark.parametrize(
    "rows", [[], [{"arm": "a", "p": ""}, {"arm": "b", "p": "-"}]], ids=["no row", "names alone"]
)
def test_a_table_that_says_nothing_is_left_out(rows):
    assert section("Title", Table.of("t", rows, "A caption.")).markdown() == ""
    assert section("Title", Table.of("t", [*rows, {"arm": "c", "p": ("0.1", 0.1)}])).html() != ""


@pytest.mark.parametrize("text", ["a: 1\n\n# not a heading\nb: `x` **y**\n", "a: |\n  ```\n  code\n  ````\n"])
def test_a_file_is_shown_character_by_character(text):
    fence, *lines, last = Code(text, "yaml").markdown().splitlines()
    assert lines == text.splitlines()
    assert fence == f"{last}yaml"
    assert not any(last in line for line in lines)
    (inside,) = re.findall(r"<pre[^>]*>(.*)</pre>", Code(text, "yaml").html(), re.DOTALL)
    assert inside == text
