"""Executors of trials: in this process, or on Ray. The only folder that imports Ray.

An executor has `slots`, takes requests for trials (`submit`), and returns (trial id, message) pairs as they
arrive (`wait`). The id is empty for a Notice, which concerns the executor itself.
"""

from ablate.execution.workers.cluster import ClusterError, ClusterLost
from ablate.execution.workers.inline import Inline
from ablate.execution.workers.pool import Pool

__all__ = ["ClusterError", "ClusterLost", "Inline", "Pool"]
