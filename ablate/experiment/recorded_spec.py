"""Spec of a trial as it was recorded, by this release or another: `RecordedSpec`.

`TrialSpec.parse` reads a spec that is to be run, and refuses one that this code resolves differently. Reports
compare trials of any release, whose workloads, fields and recipes this one may not have. So nothing is
validated here, and a part that is missing is empty.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class RecordedSpec:
    """Parts of a spec as JSON data."""

    content: Mapping[str, Any]
    """The whole spec."""
    workload: str
    """Name of the workload; empty if the spec has none."""
    config: Mapping[str, Any]
    """Fields of the workload."""
    recipe: Mapping[str, Any] | None
    forks: Mapping[str, Any] | None
    """Windows that the trial trains from a trunk; None: one run."""
    engine: str
    device: str
    data: str
    """Fingerprint of the data."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        chosen = content.get("workload")
        ((workload, config),) = chosen.items() if isinstance(chosen, dict) and chosen else (("", {}),)
        texts = (content.get(key, "") for key in ("engine", "device", "data"))
        return cls(content, workload, config, content.get("recipe"), content.get("forks"), *texts)

    @property
    def steps(self) -> int:
        """Steps that the trial counts, those of its windows if it is forked. InputError if this version has
        no such workload."""
        from ablate.training.fork_design import Forks  # few readers of a spec need these
        from ablate.training.workloads import recorded

        whole = recorded(self.workload, self.config).steps
        return Forks.model_validate_json(json.dumps(self.forks)).steps if self.forks else whole

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Return the parts of a spec, given as a JSON object; ValueError for any other text."""
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("a spec is a JSON object")
        return cls.of(content)
