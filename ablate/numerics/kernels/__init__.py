"""Fast quantisers, asked whether they can: what they compute equals the reference bit for bit, or they say no."""
