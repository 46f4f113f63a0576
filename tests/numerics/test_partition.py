"""Parts of a matrix, quantised by processes that each have one, are the parts of the whole quantised: bit for bit, whatever is drawn."""

import pytest
import torch
from support.operands import STORABLE, same, tensor
from support.ranks import in_ranks
from torch import Tensor

from ablate.numerics.history import History
from ablate.numerics.partition import Partition
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Hadamard, Outer, Quant
from ablate.numerics.stored import gather_packed, store_one
from ablate.recipes import PRESETS

ROTATED = Hadamard(size=16, signs="fixed")


def cases() -> dict[str, tuple[Quant, Hadamard | None]]:
    """Every operand of every preset with its product's rotation, and statistics that no preset has; transforms need the whole matrix."""
    found = {}
    for name, preset in PRESETS.items():
        products = preset().products
        for slot, quant in products.quantised():
            if quant.transform is None:
                found[f"{name} {slot}"] = quant, getattr(products, slot.partition(".")[0]).hadamard
    found["percentile"] = Quant(outer=Outer(statistic="percentile:0.99")), None
    found["rows"] = Quant(outer=Outer(granularity="row")), None
    found["rows, rotated"] = Quant(outer=Outer(granularity="row")), ROTATED
    found["32 rows"] = Quant(block="16x16", outer=Outer(granularity="rows:32")), None
    found["16 rows, rotated"] = Quant(outer=Outer(granularity="rows:16")), ROTATED
    found["held"] = Quant(outer=Outer(statistic="hold:4")), None
    return {
        name: case
        for name, case in found.items()
        if case not in list(found.values())[: list(found).index(name)]
    }


def moments(x: Tensor, quant: Quant, rotation: Hadamard | None, partition: Partition | None) -> list[Tensor]:
    """Values and amaxes of two steps' quantisation: the second one knows the first's history."""
    history, found = History(), []
    for step in range(2):
        options = {
            "rotation": rotation,
            "clock": Clock(3, step=step),
            "where": 11,
            "product": 12,
            "history": history,
        }
        operand = quantize(x * (step + 1), quant, partition=partition, **options)
        found += [operand.values.float(), torch.zeros(()) if operand.amax is None else operand.amax]
    return found


def parts_against_the_whole(count: int) -> list[str]:
    """Cases in which this rank's part is not that of the whole."""
    rank, off = torch.distributed.get_rank(), []
    for name, (quant, rotation) in cases().items():
        for axis, layout in ((0, "rows"), (1, "rows"), (1, "columns")):
            x = tensor(32 * count, 128 * count, seed=5)
            x = x if layout == "rows" else x.t().contiguous().t()
            partition = Partition(axis, rank, count)
            wanted = moments(x, quant, rotation, None)
            found = moments(partition.local(x), quant, rotation, partition)
            for ours, theirs in zip(found, wanted, strict=True):
                cut = (
                    theirs
                    if theirs.ndim < 2 or theirs.shape[axis] == ours.shape[axis]
                    else partition.local(theirs)
                )
                if not torch.equal(ours, cut):
                    off.append(f"{name} axis {axis} by {layout}: {(ours != cut).sum()} of {ours.numel()}")
    return off


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_part_is_quantised_as_the_whole_is(count):
    assert in_ranks(count, parts_against_the_whole, count) == [[]] * count


def packed_against_the_whole(count: int) -> list[str]:
    rank, off = torch.distributed.get_rank(), []
    for name, quant in STORABLE.items():
        for axis, rotation in ((0, None), (1, None), (1, ROTATED)):
            x = tensor(32 * count, 64 * count, seed=9)
            partition = Partition(axis, rank, count)
            options = {"rotation": rotation, "clock": Clock(3), "where": 4}
            whole = store_one(x, quant, **options)
            got = gather_packed(
                store_one(partition.local(x).contiguous(), quant, partition=partition, **options), partition
            )
            if not same(got, whole):
                off.append(f"{name} axis {axis} {rotation}")
    return off


def test_gathered_codes_and_scales_are_those_of_the_whole():
    assert in_ranks(2, packed_against_the_whole, 2) == [[], []]


def amaxes_with_a_nan() -> list[float]:
    mine = torch.tensor(
        [1.0, float("nan"), 3.0] if torch.distributed.get_rank() else [2.0, 1.0, float("inf")]
    )
    return Partition(0, torch.distributed.get_rank(), 2).largest(mine).tolist()


def test_a_nan_that_one_process_has_reaches_all():
    for found in in_ranks(2, amaxes_with_a_nan):
        assert found[0] == 2
        assert found[1] != found[1]
        assert found[2] == float("inf")


@pytest.mark.parametrize(
    ("shape", "axis", "quant", "said"),
    [
        ((8, 64), 0, Quant(block="16x16"), "it has 8 rows, no multiple of 16"),
        ((16, 24), 1, Quant(), "it has 24 columns, no multiple of 16"),
        ((16, 64), 1, Quant(outer=Outer(granularity="block:128")), "no multiple of 128"),
    ],
)
def test_a_part_that_cuts_a_block_is_refused(shape, axis, quant, said):
    with pytest.raises(ValueError, match=said):
        quantize(torch.ones(shape), quant, clock=Clock(0), partition=Partition(axis, 0, 2))
