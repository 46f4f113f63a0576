"""Short names of workload fields under `ablate`, `arms` and `against`.

A short name, as in `lr: [1.0e-3, 3.0e-3]`, is the name of its field. It stands for `workload.<field>` in
every workload that has the field, and must differ from the short names of recipe fields.
"""

WORKLOAD_KNOBS = {
    "steps": "Optimizer steps.",
    "batch": "Sequences of a micro-batch.",
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
}
"""Help of each short name; its values are those of the field."""
