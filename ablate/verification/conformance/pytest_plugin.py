"""Pytest fixture for a kernel's own tests: `conform(quantise, "nvfp4")` fails with the table of wrong stages.

Installed with this package; a project that does not install it as a plug-in writes
`pytest_plugins = ["ablate.verification.conformance.pytest_plugin"]` in its conftest.py.
"""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def conform() -> Callable[..., Any]:
    """Return a function that examines a subject as `ablate.conform` does, and fails the test with a table.

    It takes the arguments of `ablate.conform`, and returns its findings.
    """

    def examine(subject: Any, recipe: Any = "nvfp4", **more: Any) -> Any:
        from ablate.errors import InputError
        from ablate.verification.conformance.run import conform as examined

        try:
            findings = examined(subject, recipe, **more)
        except InputError as error:
            pytest.fail(str(error), pytrace=False)
        if not findings.passed:
            pytest.fail(f"{findings.table}\n{findings.text}", pytrace=False)
        return findings

    return examine
