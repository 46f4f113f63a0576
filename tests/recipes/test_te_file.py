"""File of Transformer Engine's recipe objects: it holds the code that the recipe needs, and no other."""

import re

from ablate.recipes import PRESETS
from ablate.recipes.targets import TARGETS, Model


def test_tes_file_counts_blocks_and_phases_only_if_the_recipe_has_them():
    for name in ("nvfp4", "mxfp8", "nvfp4_paper", "healing"):
        recipe = PRESETS[name]()
        text = TARGETS["te"].write(recipe, Model(name))
        assert not re.search(r"\* blocks // 1\)|OWN\[\(\)\]|\{\(\):|active = \(\)", text)
        assert ("active = (" in text, "last = " in text) == (
            bool(recipe.schedule),
            bool(recipe.layers.last_fraction),
        )
        made: dict = {}
        function = text[text.index("def quantised") :].partition("\n\n\n")[0]
        exec(function, made)
        for blocks in (1, 7, 20, 33):
            assert [made["quantised"](block, blocks) for block in range(blocks)] == [
                recipe.layers.quantises(block, blocks) for block in range(blocks)
            ]
