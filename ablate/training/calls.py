"""Calls of a model's layers within one step, to tell micro-batches apart: `Calls`.

The problem. Random bits differ between micro-batches, and nobody says which one a call belongs to. The
second call of a layer begins the second micro-batch; but activation checkpointing calls a layer again in the
backward pass, and nothing of that call says which forward pass it repeats.

The idea. As a rule one forward pass alone waits for its backward pass, and it is the one that is repeated.
A reentrant checkpoint's forward pass builds no graph, as one that no backward pass follows; those count
only if no pass with a graph waits. If several wait and bits would be drawn, the call is refused.
"""

import torch

from ablate.engines.emulated_layer import EmulatedLinear


class Calls:
    """Calls of the layers in one step or evaluation."""

    def __init__(self) -> None:
        self.present: set[int] = set()
        """Layers called in the present micro-batch."""
        self._done: dict[tuple[int, bool], dict[int, bool]] = {}
        """Micro-batches, and whether the backward pass ran, by layer and whether the call builds a graph."""

    def copy(self) -> "Calls":
        copied = Calls()
        copied.present = set(self.present)
        copied._done = {key: dict(calls) for key, calls in self._done.items()}
        return copied

    def begin(self, layer: EmulatedLinear, micro_batch: int) -> None:
        self.present.add(id(layer))
        key = id(layer), torch.is_grad_enabled()
        waiting = {m: done for m, done in self._done.get(key, {}).items() if not done}
        self._done[key] = {**waiting, micro_batch: False}

    def end(self, layer: EmulatedLinear, micro_batch: int) -> None:
        """Note a backward pass. Its call is forgotten at the next forward pass, since it may be repeated."""
        for builds_graph in (True, False):
            calls = self._done.get((id(layer), builds_graph), {})
            if micro_batch in calls:
                calls[micro_batch] = True

    def recomputed(self, layer: EmulatedLinear, present: int) -> int:
        """Return the micro-batch of a forward pass that a backward pass repeats. RuntimeError if the layer
        draws random bits, and several of its calls wait."""
        calls = self._done.get((id(layer), True)) or self._done.get((id(layer), False)) or {present: False}
        waiting = [micro_batch for micro_batch, done in calls.items() if not done] or list(calls)
        products = layer.products
        turns = (products.fprop.hadamard, products.dgrad.hadamard, products.wgrad.hadamard)
        turns_anew = any(turn and turn.signs == "per_call" for turn in turns)
        if len(waiting) > 1 and (turns_anew or any(quant.draws for _, quant in products.quantised())):
            raise RuntimeError(
                f"{layer.name}: {len(waiting)} forward passes of this layer wait for their backward passes,"
                " and its activations are recomputed (checkpointing); which random bits to draw again is not"
                " known. Call backward after each micro-batch, or do not checkpoint this layer"
            )
        return waiting[-1]
