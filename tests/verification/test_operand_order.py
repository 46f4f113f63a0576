"""Order of recipes by the errors of their operands (verification/operand_order.py)."""

import numpy as np
import pytest

from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Recipe, Wgrad
from ablate.training.operand_errors import RecipeErrors
from ablate.verification.operand_order import MARGIN, Order, Ranking, compare

LAYERS = 8
BOTH, FORWARD, NOTHING = (True, True), (True, False), (False, False)
NVFP4, OTHER = PRESETS["nvfp4"](), PRESETS["quartet2"]()


def errors(recipe, by_layer, bias=None, passes=BOTH):
    """Errors of so much in each layer, in one operand and two batches around their mean."""

    def table(values):
        values = np.broadcast_to(np.asarray(values, float), LAYERS)
        whole = np.zeros((LAYERS, 2, 6))
        whole[:, 0, 1], whole[:, 1, 1] = 0.5 * values, 1.5 * values
        return whole

    return RecipeErrors(recipe, table(by_layer), table(by_layer if bias is None else bias), 1.0, passes)


NOISE = np.resize([1.0, -1.0], LAYERS)
"""Mean zero; half the 95 % t interval over 8 layers is 0.89 = 2.36 * 1.07 / 8 ** 0.5."""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param({"by_layer": 1.0}, {"by_layer": 1.2}, Order.FIRST, id="lower error"),
        pytest.param({"by_layer": 1.0}, {"by_layer": 1 + 0.9 * MARGIN}, Order.CLOSE, id="within the margin"),
        pytest.param({"by_layer": 1.0}, {"by_layer": 1.8 + NOISE}, Order.CLOSE, id="not apart over layers"),
        pytest.param({"by_layer": 1.0}, {"by_layer": 2.0 + NOISE}, Order.FIRST, id="apart over layers"),
        pytest.param({"by_layer": 1.0}, {"by_layer": 2.0, "bias": 0.1}, Order.BIAS, id="more bias"),
        pytest.param(
            {"by_layer": 1.0, "bias": 0.1}, {"by_layer": 2.0, "bias": 0.07}, Order.FIRST, id="bias alike"
        ),
        pytest.param({"by_layer": 1.0, "bias": 0.1}, {"by_layer": 2.0}, Order.FIRST, id="less bias"),
        pytest.param({"by_layer": 1.0}, {"by_layer": 1.0, "bias": 0.1}, Order.CLOSE, id="bias alone"),
        pytest.param({"by_layer": 1.0}, {"by_layer": 2.0, "passes": FORWARD}, Order.GROUP, id="passes"),
        pytest.param(
            {"by_layer": 0.0, "passes": NOTHING}, {"by_layer": 0.0, "passes": NOTHING}, Order.GROUP, id="none"
        ),
    ],
)
def test_pairs_are_ordered_only_if_error_and_bias_allow_it(first, second, expected):
    one, other = errors(NVFP4, **first), errors(OTHER, **second)
    turned = {Order.FIRST: Order.SECOND, Order.SECOND: Order.FIRST}
    assert compare(one, other) is expected
    assert compare(other, one) is turned.get(expected, expected)
    assert expected.decided == (expected in turned)


@pytest.mark.parametrize("count", range(1, 6))
def test_few_layers_order_nothing(count):
    """Differences that are alike in all layers have an interval of no width."""
    one, other = (
        RecipeErrors(recipe, np.full((count, 1, 6), value), np.full((count, 1, 6), value), 1.0, BOTH)
        for recipe, value in ((NVFP4, 1.0), (OTHER, 2.0))
    )
    assert compare(one, other) is (Order.FIRST if count >= 4 else Order.CLOSE)


def test_a_rotation_of_a_gradients_product_alone_is_not_ordered():
    quant = Quant()
    plain = Recipe(wgrad=Wgrad(g=quant, x=quant))
    turned = Recipe(wgrad=Wgrad(g=quant, x=quant, hadamard=Hadamard(size=16)))
    finer = Recipe(wgrad=Wgrad(g=quant, x=Quant(block="1x8"), hadamard=Hadamard(size=16)))
    assert compare(errors(plain, 2.0), errors(turned, 1.0)) is Order.ROTATION
    assert compare(errors(plain, 2.0), errors(finer, 1.0)) is Order.SECOND
    assert compare(errors(plain, 1.0), errors(plain, 1.0)) is Order.CLOSE


def test_groups_hold_recipes_of_equal_passes_from_the_lowest_error_up():
    measured = {
        "third": errors(NVFP4, 3.0),
        "forward": errors(NVFP4, 1.0, passes=FORWARD),
        "none": errors(NVFP4, 0.0, passes=NOTHING),
        "second": errors(OTHER, 2.0),
    }
    ranking = Ranking(measured)
    assert [*ranking.groups.values()] == [["second", "third"], ["forward"], ["none"]]
    assert ranking.pairs(["second", "third"]) == {("second", "third"): Order.FIRST}
    document = ranking.document()
    assert [row["error"] for row in document["recipes"]] == pytest.approx([2.0, 3.0, 1.0, 0.0])
    assert document["pairs"] == [{"first": "second", "second": "third", "order": "first"}]
