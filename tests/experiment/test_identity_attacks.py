"""An edit of code that a trial executes gives the trial another id, or the code is refused: never neither."""

import pytest
from support.cases import every
from support.identity_attacks import ATTACKS, CHANGED, identity, outcome, surroundings

from ablate import own_source
from ablate.errors import InputError


@every(attack=ATTACKS)
def test_an_edit_of_a_helper_is_in_the_id_or_the_helper_is_refused(attack, tmp_path):
    assert outcome(ATTACKS[attack], tmp_path) == ATTACKS[attack].outcome


@every(attack=[name for name, attack in ATTACKS.items() if attack.outcome == CHANGED])
def test_the_id_is_the_same_in_another_folder(attack, tmp_path):
    ids = set()
    for name in ("here", "over/there"):
        folder = ATTACKS[attack].write(tmp_path / name)
        with surroundings(ATTACKS[attack], folder):
            ids.add(identity(ATTACKS[attack], folder)[0])
    assert len(ids) == 1


def test_the_sentence_on_an_unknown_import_names_the_file_and_what_to_write(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    (tmp_path / "mine.py").write_text(
        "import importlib\nimportlib.import_module('hel' 'per'[0:])\ndef f(): ...\n"
    )
    code = own_source.Code(tmp_path / "mine.py", "f", tmp_path)
    with pytest.raises(InputError) as refused:
        own_source.load_apart(code)
    assert str(refused.value) == (
        f"{tmp_path}/helper.py is imported, and no import statement names it, so that no trial's id has it:"
        " write `import helper` at the top of the file"
    )
