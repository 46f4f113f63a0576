"""Random bits: the published generator, in the documented layout, and nothing but a function of where and when."""

import itertools

import pytest
import torch
from scipy import stats
from support.cases import every

from ablate.numerics.kernels import builds
from ablate.numerics.philox import STREAMS, Clock, philox, random_bits, site

WIDTHS = (8, 16, 24)
KNOWN = [  # Random123, tests/kat_vectors: philox4x32 with 10 rounds
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_hand(counter, key):
    """Philox4x32-10 on Python integers, from the paper's definition."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return tuple(c)


def bits(clock=None, where=0, rows=64, columns=1024, width=8):
    return random_bits(clock or Clock(1), where, rows, columns, width, torch.device("cpu"))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_published_vectors_come_out(counter, key, answer):
    assert philox_by_hand(counter, key) == answer
    assert tuple(philox(torch.tensor(counter).unsqueeze(1), key)[:, 0].tolist()) == answer


def test_many_counters_and_keys_equal_an_implementation_on_python_integers(generator):
    counters = torch.randint(0, 2**32, (4, 50), generator=generator)
    for key in torch.randint(0, 2**32, (10, 2), generator=generator).tolist():
        mine = philox(counters, tuple(key)).t().tolist()
        assert [tuple(words) for words in mine] == [
            philox_by_hand(counter, key) for counter in counters.t().tolist()
        ]


def test_philox_leaves_its_counters_alone():
    counter = torch.zeros(4, 3, dtype=torch.int64)
    philox(counter, (1, 2))
    assert counter.eq(0).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_sixteen_elements_share_a_counter_of_group_step_micro_batch_and_site(width):
    clock, where = Clock(7, "evaluation", step=3, micro_batch=5), site("blocks.0.up", "wgrad.g")
    compiled = bits(clock, where, rows=2, columns=32, width=width).view(4, 16)
    with builds.using(None):
        mine = bits(clock, where, rows=2, columns=32, width=width).view(4, 16)
    fields = 32 // width  # draws in one 32-bit word
    for group in range(4):
        words = [
            word
            for call in range(4 // fields)
            for word in philox_by_hand((group, 3, 5, where), (7, STREAMS["evaluation"] << 8 | call))
        ]
        expected = [
            word >> (32 // fields) * field & (1 << width) - 1 for word in words for field in range(fields)
        ]
        assert mine[group].tolist() == compiled[group].tolist() == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_every_byte_of_a_draw_is_uniform(width):
    drawn = bits(width=width).long().flatten()
    assert drawn.min() >= 0
    assert drawn.max() < 2**width
    for shift in range(0, width, 8):
        counts = torch.bincount((drawn >> shift) & 255, minlength=256)
        assert (
            stats.chisquare(counts.numpy()).pvalue > 1e-4
        )  # one fixed draw of 65,536: a uniform one fails 1 in 10,000


NEIGHBOURS = {
    "layer": (Clock(1), site("blocks.1.up", "wgrad.g")),
    "slot": (Clock(1), site("blocks.0.up", "dgrad.g")),
    "step": (Clock(1, step=1), site("blocks.0.up", "wgrad.g")),
    "micro-batch": (Clock(1, micro_batch=1), site("blocks.0.up", "wgrad.g")),
    "stream": (Clock(1, "evaluation"), site("blocks.0.up", "wgrad.g")),
    "seed": (Clock(2), site("blocks.0.up", "wgrad.g")),
}


@every(changed=NEIGHBOURS, width=WIDTHS)
def test_another_place_or_time_draws_independent_bits(changed, width):
    first = bits(Clock(1), site("blocks.0.up", "wgrad.g"), width=width)
    second = bits(*NEIGHBOURS[changed], width=width)
    cells = (
        (first.long() >> width - 4) * 16 + (second.long() >> width - 4)
    ).flatten()  # the joint of the top four bits
    assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-4


def test_neighbouring_elements_rows_and_calls_are_independent():
    drawn = bits(width=16).long() >> 12
    for a, b in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:]), (drawn[:, :-8], drawn[:, 8:])):
        assert stats.chisquare(torch.bincount((a * 16 + b).flatten(), minlength=256).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("width", WIDTHS)
def test_bits_for_another_purpose_are_independent(width):
    first, second = (
        random_bits(Clock(1), 5, 64, 1024, width, torch.device("cpu"), purpose) for purpose in (0, 1)
    )
    cells = ((first.long() >> width - 4) * 16 + (second.long() >> width - 4)).flatten()
    assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-4


def test_streams_never_share_a_key_whatever_the_call():
    keys = [
        number << 8 | purpose << 4 | call
        for number in STREAMS.values()
        for purpose in range(16)
        for call in range(4)
    ]
    assert len(set(keys)) == len(keys)
    drawn = [
        tuple(random_bits(Clock(1, stream), 5, 1, 16, width, torch.device("cpu"), purpose).flatten().tolist())
        for stream, purpose, width in itertools.product(STREAMS, range(4), WIDTHS)
    ]
    assert len(set(drawn)) == len(drawn)


def test_the_same_clock_and_site_draw_the_same_bits_whatever_was_drawn_before():
    first = bits(Clock(3, step=9), 5)
    bits(Clock(4), 6)
    torch.rand(10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(bits(Clock(3, step=9), 5), first)


def test_the_bits_of_a_group_do_not_depend_on_how_many_rows_follow():
    assert torch.equal(bits(rows=8)[:4], bits(rows=4))


def test_the_sites_of_a_model_differ():
    names = [
        f"blocks.{i}.{part}"
        for i in range(200)
        for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    sites = {site(name, slot) for name, slot in itertools.product(names, ("dgrad.g", "wgrad.g"))}
    assert len(sites) == 2 * len(names)
    assert all(0 <= s < 2**32 for s in sites)
