"""Counter-based random bits: a draw depends on its place and time, never on earlier draws.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A
resumed run, a forked run, a recomputed activation, every device and every thread count therefore draw the
same bits, and evaluation advances no state. docs/reference/numerics.md (section 5) lists the words of key and
counter.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from ablate.numerics.kernels import builds

GROUP = 16
"""Elements that share one Philox call at 8 bits an element."""
_NAMES = ("training", "evaluation", "data", "weights", "augmentation", "masking", "twin", "redraw")
STREAMS = {name: number for number, name in enumerate(_NAMES)}
"""Numbers of the streams. `twin` is that of a second run with the same recipe and seed, `redraw`
that of a second gradient of one step."""
MOST_MICRO_BATCHES = 2**20
"""Micro-batches of a step in which a layer may be called several times."""
_MOST_CALLS = 2**11
"""Calls of a layer in one micro-batch, so that the counter's word has no sign as a 32-bit integer."""
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


@dataclass
class Clock:
    """Time of a draw: the seed, the stream, the optimizer step and the (global) micro-batch within it."""

    seed: int
    stream: str = "training"
    step: int = 0
    micro_batch: int = 0
    calls: dict[str, int] | None = None
    """Number of calls of each layer since `begin`; None: calls are not counted, and draw the same bits."""
    redraw: bool = field(default=False, repr=False)
    """True in a second gradient of a step, which has bits of its own, and the noise and dropout of the first:
    those are drawn by `replace(clock, redraw=False)` and by `str(clock)`."""

    @property
    def trains(self) -> bool:
        """True in the steps of a run, or of its twin, that amax histories record."""
        return self.stream in ("training", "twin") and not self.redraw

    def begin(self, micro_batch: int) -> None:
        """Begin a micro-batch: count the calls of its layers from 0."""
        self.micro_batch, self.calls = micro_batch, {}

    def called(self, layer: str) -> int:
        """Return the micro-batch by which a layer's next call draws: call k adds k * 2^20 to it. RuntimeError
        if the number would be that of another micro-batch or call."""
        if self.calls is None:
            return self.micro_batch
        number = self.calls.get(layer, 0)
        self.calls[layer] = number + 1
        if number and (self.micro_batch >= MOST_MICRO_BATCHES or number >= _MOST_CALLS):
            raise RuntimeError(
                f"{layer}: call {number} of micro-batch {self.micro_batch} has no random bits of its own;"
                f" a layer may be called {_MOST_CALLS} times in each of {MOST_MICRO_BATCHES} micro-batches"
            )
        return self.micro_batch + number * MOST_MICRO_BATCHES

    @contextmanager
    def within(self, micro_batch: int) -> Iterator[None]:
        """Inside this context, it is this micro-batch."""
        before, self.micro_batch = self.micro_batch, micro_batch
        try:
            yield
        finally:
            self.micro_batch = before


def site(layer: str, slot: str) -> int:
    """Return the place of a draw as 32 bits: a hash of a layer's qualified name and a slot (`wgrad.g`)."""
    return int.from_bytes(blake2b(f"{layer}/{slot}".encode(), digest_size=4).digest(), "little")


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Apply ten rounds to counters, int64 [4, n] of words in [0, 2^32), by a key of two 32-bit words; return
    the like. The 32x32-bit products wrap in int64; their high and low words are still exact."""
    multiplier, keys = schedule(key, counter.device)
    even, odd = counter[0::2], counter[1::2]  # words (0, 2) and (1, 3)
    for round_key in keys:
        product = (even * multiplier).flip(0)  # the two words cross over
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(_MASK)
        odd = product  # its low half; the high half goes in the next round's mask
    return torch.stack((even, odd & _MASK), dim=1).view(4, -1)


@lru_cache(maxsize=64)
def schedule(key: tuple[int, int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return Philox's multipliers, int64 [2, 1] on the device, and the keys of its ten rounds."""
    keys = [[[(k + r * w) & _MASK] for k, w in zip(key, _WEYL, strict=True)] for r in range(10)]
    multiplier = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device).unsqueeze(1)
    return multiplier, list(torch.tensor(keys, dtype=torch.int64, device=device))


def philox_key(clock: Clock, purpose: int = 0, call: int = 0) -> tuple[int, int]:
    """Return the two key words: the seed; and stream, purpose and call."""
    return clock.seed & _MASK, STREAMS["redraw" if clock.redraw else clock.stream] << 8 | purpose << 4 | call


def random_bits(
    clock: Clock, where: int, rows: int, columns: int, width: int, device: torch.device, purpose: int = 0
) -> Tensor:
    """Return uniform integers in [0, 2^width), fp32 [rows, columns], the columns a multiple of GROUP.

    The counter is (row-major index of the group, step, micro-batch, draw site `where`). One Philox call gives
    128 bits, enough for one group of 16 consecutive elements at width 8; `width` 16 and 24 take more calls,
    which the second key word distinguishes. `purpose`: 0 elements, 1 block scales, 2 noise, 3 order of
    permuted errors.
    """
    groups = rows * columns // GROUP
    if device.type == "cpu" and (kernels := builds.build()):
        bits = torch.empty(rows, columns, dtype=torch.float32)
        key, now = (ctypes.c_uint32 * 2)(*philox_key(clock, purpose)), (clock.step, clock.micro_batch, where)
        kernels.random_bits(key, (ctypes.c_uint32 * 3)(*now), width, groups, bits.data_ptr())
        return bits
    counter = torch.empty(4, groups, dtype=torch.int64, device=device)
    torch.arange(groups, out=counter[0])
    for word, value in enumerate((clock.step, clock.micro_batch, where), start=1):
        counter[word].fill_(value)  # an assignment makes a scalar on the CPU
    fields = {8: 4, 16: 2, 24: 1}[width]  # draws in one 32-bit word
    words = [philox(counter, philox_key(clock, purpose, call)) for call in range(4 // fields)]
    # torch's default dtype may be another, and 24 bits fit no narrower one.
    bits = torch.empty(groups, 4 // fields, 4, fields, dtype=torch.float32, device=device)
    for call, four in enumerate(words):
        for part in range(fields):
            bits[:, call, :, part] = (four.t() >> (32 // fields) * part).bitwise_and_((1 << width) - 1)
    return bits.view(rows, columns)
