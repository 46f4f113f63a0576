"""Short names of workload fields under `ablate`, `arms` and `against`: `lr: [1.0e-3, 3.0e-3]` instead of `workload.lr`.

A short name is the name of its field, and stands for `workload.<field>` in every workload that has the field. No short name of a
recipe's knob may be among them.
"""

WORKLOAD_KNOBS = {
    "steps": "Optimizer steps.",
    "batch": "Sequences or images of a micro-batch.",
    "accumulate": "Micro-batches of a step.",
    "lr": "Peak learning rate.",
    "warmup": "Fraction of the run over which the learning rate rises to its peak.",
    "optimizer": "The optimizer.",
    "weight_decay": "Weight decay of the matrices.",
    "clip": "Largest norm of the gradient.",
    "context": "Tokens of a sequence.",
    "layers": "Transformer blocks.",
    "width": "Features of the residual stream.",
    "heads": "Attention heads.",
    "hidden": "Features within an MLP.",
    "mask_ratio": "Share of an image's patches that are masked.",
}
"""Help of each name; the values are those of the field."""
