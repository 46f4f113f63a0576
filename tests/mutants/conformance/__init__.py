"""Faulty and correct subjects for the conformance kit, in four sets, and what the kit sees of each.

    python tests/mutants/conformance/run.py                # how many of each set the kit sees
    python tests/mutants/conformance/run.py --set fourth

A mutant is a published numerical fault of an FP4 or MX library, or in the fourth set perhaps a plausible one,
rebuilt so that nothing else differs; some faults need a particular shape, magnitude, stride or earlier call.
A control is correct but written otherwise, and equals the reference bit for bit. The later sets were
committed before the kit was run on them. A mutant is seen if a row of the kit fails; what fails on a control
is a false alarm.
"""
