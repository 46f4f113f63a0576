"""A module beside the functions, which they import."""

HALF = 0.5
