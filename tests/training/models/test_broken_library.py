"""A library that is installed and cannot be imported is hidden while another is imported, and never longer; so are log
messages."""

import logging
import sys
from importlib.util import find_spec

import pytest

from ablate.training.models import hidden_if_broken, quietly


@pytest.fixture
def broken(tmp_path, monkeypatch) -> str:
    (tmp_path / "library_without_its_native_part.py").write_text(
        "raise OSError('libcuda.so.1: no such file')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "library_without_its_native_part"


def test_a_broken_library_is_as_if_it_were_not_installed(broken):
    assert find_spec(broken) is not None
    with hidden_if_broken(broken):
        assert find_spec(broken) is None
    assert find_spec(broken) is not None


def test_it_is_found_again_after_an_error(broken):
    with pytest.raises(ValueError, match="another"), hidden_if_broken(broken):
        raise ValueError("another library failed")
    assert broken not in sys.modules
    assert find_spec(broken) is not None


def test_a_library_that_is_in_use_stays(broken, monkeypatch):
    monkeypatch.setitem(sys.modules, broken, sys)
    with hidden_if_broken(broken):
        assert sys.modules[broken] is sys


@pytest.mark.parametrize("earlier", [logging.NOTSET, logging.DEBUG, logging.CRITICAL])
def test_log_messages_that_were_disabled_before_stay_disabled(earlier):
    def levels() -> list[bool]:
        return [logging.getLogger("x").isEnabledFor(level) for level in (logging.WARNING, logging.ERROR)]

    logging.disable(earlier)
    try:
        before = levels()
        with quietly():
            with pytest.raises(ValueError, match="inner"), quietly():
                raise ValueError("inner")
            assert levels() == [False, before[1]]
        assert (levels(), logging.root.manager.disable) == (before, earlier)
    finally:
        logging.disable(logging.NOTSET)
