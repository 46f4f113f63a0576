"""Where trials run: in this process, or on Ray. The only folder that knows Ray.

A pool has `slots`, takes a request for a trial (`submit`), and gives back (trial id, message) pairs as they come (`wait`); the id is
empty for a Notice, which is about the pool itself.
"""

from ablate.execution.workers.cluster import ClusterError, ClusterLost
from ablate.execution.workers.inline import Inline
from ablate.execution.workers.pool import Pool

__all__ = ["ClusterError", "ClusterLost", "Inline", "Pool"]
