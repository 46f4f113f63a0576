"""Conformance kit: find out whether somebody else's low-precision quantiser or product computes a recipe.

`subject.py` says how another implementation is called, `result.py` what is said of it.
"""
