"""Evidence for `ablate rank`: how often does the error of operands order recipes as training does?

    python benchmarks/rank_evidence.py published     # 26 schemes, 102 pairs within groups
    python benchmarks/rank_evidence.py elsewhere     # recipes of other publications

The text below is the design. It was committed before a published loss was joined with a number of this
command.

Measure. The model is the command's built-in one: 6 blocks of width 128, trained in bf16 for 240 steps at a
constant rate, seed 0. Its operands x, w and g are captured on the 3 batches after that. An operand's error is
|q - t|^2 / |t|^2: t is the bf16 tensor of the capture, q what the product receives in its place, rotated
back. An operand that is quantised from the forward pass's copy, or is that copy, is compared with t as well,
so the copy's error counts. A layer's error is the sum over its six operands, 0 for those in bf16; a recipe's
is the mean over all layers and batches. Bias is the same with E q in place of q, over 4 draws of bits and
signs: with b1 and b2 the mean errors of two halves of the draws, it is <b1, b2> / |t|^2. An operand without
draws has its error as bias. Signs that last a whole run are not drawn again.

Rule. Recipes stand in groups by the passes that they quantise: forward, backward, both. Two recipes of one
group are compared layer by layer, each layer's value being its mean over batches. "Lower" needs both: the
95 % t interval of the mean difference over layers excludes 0, and the difference is at least `MARGIN`, 5 %,
of the smaller of the two errors. The same rule, with the same scale, says if a bias is higher. Then:

- errors not apart: too close to call;
- recipes that differ in the rotation of dgrad or wgrad alone: not ordered;
- one error lower and its bias not higher: ordered, this is what counts as decided;
- one error lower and its bias higher: not ordered, training decides.

Published schemes (transfer_schemes.py). The order of the losses at 100 M parameters and 97 tokens a parameter
within groups, 102 pairs. Each pair is in one of three columns, by facts of the recipes alone:

- nested: the quantised operands of one are among those of the other, with equal quantisers and rotations, or
  the passes' quantisers differ only in that one chooses for each block between two scales (4/6) where the
  other has none: the sum of errors orders these by construction;
- facts: not nested, and of the facts (set of operands, 16x16 weights, 4/6, MS-EDEN in place of stochastic
  rounding) all that differ point to the same scheme;
- rest: no fact differs, or facts contradict each other. This column is the headline.

Pairs whose losses are closer than .0010, about the noise of a loss, are given again apart. Figures: decided n
of N, right m of n, refused N - n by reason; interval of m / n by bootstrap over the two factors of each
scheme, as in transfer_table.py. Curve: the margin from 0 to 1. Beside it the plain order of the error, which
refuses nothing, and the same on all other sizes and lengths.

Other publications (rank_published.csv: facts and outcomes with sources). All settings with at least two
quantised recipes that can be written as recipes of this package; all pairs of a setting, within groups.
Predictions are committed first (rank_predictions.csv), outcomes joined after. Recipes without quantisation
take no part, since everything is above them. What a table does not state is the same for all rows of its
setting: that of `nvfp4` or, of MXFP4, nearest, 32x32 weights if so stated. Layers kept in bf16 are left out
if all rows keep the same. Pairs that compile to one recipe count as refused. An outcome is the published
metric; equal values and the word `same` are ties, counted apart; `diverged` and `unstable` come after
`converged`; rows with words against a reference are compared with the reference alone. Rivals on the same
pairs: fewer quantised operands first; finer blocks (elements a scale, mean over quantised operands) first.
Interval: bootstrap over sources.

Known before: the error of each operand against what it was cast from, summed over six, orders 88.5 of these
102 pairs on another small model (transfer.py), read there after the outcome as the best of eight; a prose
summary of outcomes of the other publications. No rule tried on them was discarded.
"""

MARGIN = 0.05
"""Least difference, in parts of the smaller error, that orders two recipes."""
