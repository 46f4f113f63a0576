"""docs/reference/recipes.md is generated: it must be what the presets and knobs say today."""

import re

from regenerate_recipes_page import PAGE, page

from ablate.recipes import KNOBS, PRESETS
from ablate.recipes.experts import Experts


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "run `make pages`"


def test_the_page_has_every_preset_and_every_knob():
    text = PAGE.read_text()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == list(PRESETS)
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(KNOBS)


def test_every_preset_treats_experts_as_the_introduction_says():
    """A preset with other experts than the defaults needs a line of its own."""
    assert {name for name, preset in PRESETS.items() if preset().experts != Experts()} == set()
