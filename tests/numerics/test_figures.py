"""The figures of NUMERICS section 8: relative mean squared errors on standard normal data, in thousandths."""

import pytest
import torch

from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Quant, Range

ROOM = Range(headroom=17 / 16)
FIGURES = {
    "1x16 nearest": (Quant(), 9.05),
    "16x16 nearest": (Quant(block="16x16"), 12.39),
    "stochastic": (Quant(rounding="stochastic"), 18.8),
    "stochastic with headroom": (Quant(rounding="stochastic", range=ROOM), 23.5),
    "stochastic with headroom, 24 bits": (Quant(rounding="stochastic", range=ROOM, bits=24), 23.5),
}
WITH_HEADROOM = {1: 23.4, 4: 5.87, 16: 1.47, 64: 0.367, 256: 0.092}


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(x: torch.Tensor, estimate: torch.Tensor) -> float:
    return 1000 * ((estimate - x).double().square().sum() / x.double().square().sum()).item()


@pytest.mark.parametrize("name", FIGURES)
def test_the_relative_error_on_gaussian_data_is_the_published_one(name):
    quant, figure = FIGURES[name]
    x = gaussian(1024, 1024)
    # 1 %: sampling error at a million elements is about 0.3 %, and the amax, thus every scale, depends on the sample.
    assert error(x, quantize(x, quant, clock=Clock(0)).dequantize()) == pytest.approx(figure, rel=0.01)


def errors_of_means(quant: Quant, x: torch.Tensor) -> dict[int, float]:
    total, result = torch.zeros_like(x), {}
    for draw in range(1, 257):
        total += quantize(x, quant, clock=Clock(1, step=draw)).dequantize()
        if draw in WITH_HEADROOM:
            result[draw] = error(x, total / draw)
    return result


def test_with_headroom_the_error_of_a_mean_of_n_draws_falls_as_one_over_n():
    errors = errors_of_means(Quant(rounding="stochastic", range=ROOM), gaussian(256, 1024))
    for draws, figure in WITH_HEADROOM.items():
        # 10 %: 8 random bits leave a bias of up to 1/256 of a step, 2 % of the error at 256 draws; the rest is the sample.
        assert errors[draws] == pytest.approx(figure, rel=0.1)


def test_without_headroom_the_error_of_a_mean_stalls_at_the_bias_of_saturated_blocks():
    errors = errors_of_means(Quant(rounding="stochastic"), gaussian(256, 1024))
    assert errors[256] == pytest.approx(0.173, rel=0.1)  # the same causes; 1/N alone would leave 0.074
    assert errors[256] > errors[1] / 256 * 2


def test_stochastic_rounding_with_headroom_keeps_the_mean_magnitude_and_without_it_shrinks_the_largest():
    x = gaussian(256, 1024)
    top = x.abs().view(256, 64, 16).argmax(2, keepdim=True)
    ratio = {}
    for name, room in (("with", ROOM), ("without", Range())):
        total = sum(quantize(x, Quant(rounding="stochastic", range=room), clock=Clock(2, step=n)).dequantize() for n in range(16))
        largest = [t.view(256, 64, 16).gather(2, top).abs().double().sum() for t in (total / 16, x)]
        ratio[name] = (largest[0] / largest[1]).item()
    assert ratio["with"] == pytest.approx(1, abs=0.002)  # 8-bit truncation and 16 draws
    assert ratio["without"] < 0.993  # half of the blocks have a maximum above 6 times their scale
