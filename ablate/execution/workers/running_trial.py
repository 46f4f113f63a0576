"""One running trial on Ray, from the first call of its actors to its end, as a generator that never blocks.

The problem. A controller runs many trials in one thread. Each of them waits in turn for its actors to start,
for the lock of its folder, for files to be copied and for messages; a blocking call for one trial would stop
all the others.

The idea. The steps of one trial are one generator, `_run`, written top to bottom like a script. Where a
script would block, the generator yields the Ray references that it waits for (or none, while it waits for a
thread or a lock), and `pump` resumes it:

    messages, waits = trial.pump(ready=set())      # starts: [] and references to `Actor.describe`
    messages, waits = trial.pump(ready)            # actors answered: [] and references to `Actor.start`
    messages, waits = trial.pump(ready)            # [Events(...)] and references to `Actor.messages`
    messages, waits = trial.pump(ready)            # [Ended("done", ...)]; trial.over is now True

Of a gang, every node runs its ranks, but node 0 alone sends the trial's events and its result. When one node
ends, the others have 15 s to end by themselves; then their actors are killed.

Refused: a node with other versions of Ray, Python or this package (`Unusable`); the trial then waits for
another node. The death of an actor or of its node is no exception but an Ended with status "failed", and sets
`broken`: its actors must be replaced.
"""

import glob
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from ablate.execution.messages import Ended, Message, TrialRequest, Waiting
from ablate.execution.workers.actor import CheckpointTimes, WorkerFacts, versions
from ablate.execution.workers.cluster import Node, silence, skew, unusable
from ablate.execution.workers.remote_store import RemoteStore
from ablate.execution.workers.trial_actors import TrialActors
from ablate.experiment.recorded_spec import RecordedSpec
from ablate.files import full, user_path

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

GANG_END_SECONDS = 15.0
"""Seconds that the other nodes of a gang have to end by themselves once one of them has ended."""
_FETCH_SHARE = 10
"""The trial's own checkpoint is fetched at most every so many times the duration of the last fetch."""
_LEAST_FETCH_SECONDS = 1.0
_MISSING = ("No such file or directory: '{}", "no file matches '{}", "{}: no such folder")
"""Phrases in a trial's reason that name missing data."""
_PIECE_SECONDS = 120.0
"""Time-out of one call that transfers a piece of a file; the worker then counts as lost."""

Waits = list["ObjectRef"]
"""Ray references that a trial waits for; empty while it waits for a thread or a lock."""
_Arguments = TypeVarTuple("_Arguments")
_Returned = TypeVar("_Returned")


class Unusable(Exception):
    """A node, by Ray's id `node`, that cannot run this sweep's trials; the text says why and what would be
    right."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(why)
        self.node = node


class RunningTrial:
    """One attempt of a trial on its actors. Call `pump` until `over`."""

    def __init__(
        self,
        ray: ModuleType,
        request: TrialRequest,
        actors: TrialActors,
        nonce: str,
        threads: Executor,
        node_of: Callable[[str], Node | None],
    ) -> None:
        """Prepare the trial; the first `pump` starts it. The idle actors belong to it until it is over.

        `nonce`: path of a file in the state folder, by which a worker recognises that folder. `threads`:
        executor for slow file transfers. `node_of` returns Ray's description of a node id, or None for an
        unknown node.
        """
        self._ray, self.request, self.actors = ray, request, actors
        self._threads, self._node_of = threads, node_of
        self.began = time.monotonic()
        self.over = False
        self.broken = False
        """True if an actor is gone, or must not be used again."""
        self.last_message: dict[int, float] = {}
        """Time of each actor's last message, by index, from its first one on. A living actor sends
        heartbeats."""
        self.lost_nodes: list[str] = []
        """Ids of nodes that do not answer."""
        self.sees: bool | None = None
        """True if all actors see the state folder; None before they have answered."""
        self.compiled = True
        """False if an actor has no compiled quantisers."""
        self._ready: set[ObjectRef] = set()
        self._out: list[Message] = []
        self._pending: dict[ObjectRef, int] = {}
        """Index of the actor that each awaited reference belongs to."""
        self._ended: dict[int, tuple[Ended, CheckpointTimes]] = {}
        self._gang_deadline: float | None = None
        self._remote: RemoteStore | None = None
        self._stopped = False
        self._fetch_seconds = 0.0
        self._steps = self._run(nonce)

    @property
    def started(self) -> bool:
        """True once all actors have answered: the trial then occupies its resources."""
        return self.sees is not None

    def pump(self, ready: "set[ObjectRef]") -> tuple[list[Message], Waits]:
        """Advance as far as possible without blocking, given the Ray references that have arrived (`ready`);
        return the messages for the controller, and the references to wait for. Unusable if a node cannot run
        this sweep's trials."""
        self._ready, self._out, waits = ready, [], []
        try:
            waits = next(self._steps)
        except StopIteration:
            self.over = True
        except self._ray.exceptions.RayError as error:
            self.broken = self.over = True
            number = next((self._pending[ref] for ref in self._pending if ref in ready), 0)
            disk_full = full(getattr(error, "cause", None))
            self._out.append(Ended("failed", self._death(number, error), disk_full=disk_full))
        finally:
            if self.over and self._remote:
                self._remote.close()
        return self._out, waits

    def stop(self) -> None:
        """End the trial; `pump` still returns its Ended."""
        self._stopped = True
        for actor in self.actors.actors if self._pending else ():
            actor.stop.remote()

    def abandon(self) -> None:
        """Release the lock and temporary files at once; the caller dismisses the actors."""
        self._steps.close()
        if self._remote:
            self._remote.close()

    # The steps

    def _run(self, nonce: str) -> Generator[Waits, None, None]:
        facts = yield from self._described(nonce)
        if not facts:
            self.broken = True  # its actors may still wait for resources
            self._out.append(Ended("failed", "stopped"))
            return
        self.sees, self.compiled = (all(fact[key] for fact in facts) for key in ("sees", "compiled"))
        if not self.sees:
            self._remote = RemoteStore(self.request)
            yield from self._claim(self._remote)
            if messages := self._remote.finished():
                self._out += messages
                return
            folders = [self._scratch(number) for number in range(len(self.actors.actors))]
            yield from self._in_thread(self._remote.send_inputs, folders)
        if self._stopped:
            self._out.append(Ended("failed", "stopped"))
            return
        # Start the trial on every actor and wait for all: later calls of an actor may overtake its `start`.
        starts = zip(self.actors.actors, self.actors.requests(self.request, facts), strict=True)
        self._pending = {
            actor.start.remote(request, not self.sees): number
            for number, (actor, request) in enumerate(starts)
        }
        yield from self._all_ready()
        if self._stopped:  # meanwhile
            self.stop()
        self._pending = {actor.messages.remote(): number for number, actor in enumerate(self.actors.actors)}
        yield from self._receive()

    def _all_ready(self) -> Iterator[Waits]:
        """Wait for every pending reference; raise at once for an actor that died."""
        late = list(self._pending)
        while late:
            self._ray.get([ref for ref in late if ref in self._ready])
            late = [ref for ref in late if ref not in self._ready]
            if late:
                yield late

    def _described(self, nonce: str) -> Generator[Waits, None, list[WorkerFacts]]:
        """Wait until all actors have started; return their `describe`, or an empty list if the trial was
        stopped. A single actor is asked once: its answers hold while its trials have results, and asking
        takes a round trip. The actors of a gang draw a free port at each call."""
        if self.actors.facts:
            return self.actors.facts
        self._pending = {
            actor.describe.remote(self.request.root, nonce): number
            for number, actor in enumerate(self.actors.actors)
        }
        references = list(self._pending)
        for waits in self._all_ready():
            if self._stopped:
                return []
            yield waits
        facts = self._ray.get(references)
        self.actors.nodes = [fact["node"] for fact in facts]
        for node, fact in zip(self.actors.nodes, facts, strict=True):
            if why := skew(versions(), fact["versions"]):
                raise Unusable(node, f"node {fact['address']} {why}")
        self.actors.facts = facts if len(facts) == 1 else None
        return facts

    def _claim(self, remote: RemoteStore) -> Iterator[Waits]:
        reported = False
        while (holder := remote.claim()) and not self._stopped:
            if not reported:
                self._out.append(Waiting(holder))
                reported = True
            yield []

    def _in_thread(
        self, call: Callable[[*_Arguments], _Returned], *arguments: *_Arguments
    ) -> Generator[Waits, None, _Returned]:
        """Wait for a call in another thread; return what it returns, raise what it raises."""
        future = self._threads.submit(call, *arguments)
        while not future.done():
            yield []
        return future.result()

    def _receive(self) -> Iterator[Waits]:
        """Pass on the first actor's messages until all actors have ended."""
        available: CheckpointTimes = {}
        fetching, due = None, 0.0
        while len(self._ended) < len(self.actors.actors):
            for ref in [ref for ref in self._pending if ref in self._ready]:
                number = self._pending[ref]
                messages, listed = self._ray.get(ref)
                del self._pending[ref]
                if messages:
                    self.last_message[number] = time.monotonic()
                if number == 0 and not self._pass_on(messages):
                    return
                available = listed if number == 0 and messages else available
                end = next((message for message in messages if isinstance(message, Ended)), None)
                if end:
                    del self.last_message[number]
                    self._ended[number] = end, available
                    if len(self._ended) < len(self.actors.actors) and self._gang_deadline is None:
                        self._gang_deadline = time.monotonic() + GANG_END_SECONDS
                else:
                    self._pending[self.actors.actors[number].messages.remote()] = number
            if self._remote and 0 not in self._ended:
                fetching, due = self._fetch(self._remote, available, fetching, due)
            if self._gang_deadline and time.monotonic() > self._gang_deadline:
                self.broken = True  # the actors that have not ended are killed
                break
            yield list(self._pending)
        while fetching and not fetching.done():
            yield []
        end, available = self._outcome()
        if self._remote and 0 in self._ended:
            end = yield from self._in_thread(self._remote.finish, self._scratch(0), end, available)
        if end.result is None:  # its worker may not see the state folder any more
            self.actors.facts = None
        self._out.append(end)

    def _pass_on(self, messages: list[Message]) -> bool:
        """Pass messages on, of a remote trial through the store. Return False if a later attempt holds the
        trial."""
        for message in messages:
            if isinstance(message, Ended):
                continue
            if not self._remote:
                self._out.append(message)
                continue
            try:
                self._out += self._remote.record(message)
            except PermissionError as error:
                self.broken = True
                self._out.append(Ended("failed", str(error)))
                return False
        return True

    def _fetch(
        self, remote: RemoteStore, available: CheckpointTimes, fetching: Future | None, due: float
    ) -> tuple[Future | None, float]:
        """Fetch checkpoints that are on the worker (`available`) in a thread: shared ones at once since other
        trials wait for them, the trial's own now and then. Return the current fetch, None if there is none,
        and the time from which the trial's own may be fetched again; `fetching` and `due` are what the last
        call returned."""
        if fetching and not fetching.done():
            return fetching, due
        if fetching:
            fetching.result()
        names, now = remote.missing(available), time.monotonic()
        names = [name for name in names if now >= due or name.startswith("checkpoints/")]
        if not names:
            return None, due
        pause = max(_LEAST_FETCH_SECONDS, self.request.telemetry.get("checkpoint", 60.0) / 2)
        due = now + max(pause, _FETCH_SHARE * self._fetch_seconds)
        return self._threads.submit(self._timed_fetch, remote, names), due

    def _timed_fetch(self, remote: RemoteStore, names: list[str]) -> None:
        began = time.monotonic()
        remote.fetch(self._scratch(0), names)
        self._fetch_seconds = time.monotonic() - began

    # The end

    def _outcome(self) -> tuple[Ended, CheckpointTimes]:
        """Return the trial's end: the first node's result; without one, an out-of-memory failure of any node,
        or else the first failure."""
        none = Ended("failed", "its first node did not end with the others")
        first, available = self._ended.get(0, (none, {}))
        if first.result is not None:
            return first, available
        failures = [(number, end) for number, (end, _) in self._ended.items() if end.result is None]
        failures.sort(key=lambda failure: failure[1].status != "oom")
        number, end = failures[0] if failures else (0, first)
        return replace(end, reason=self._explained(number, end.reason or "")), available

    def _explained(self, number: int, reason: str) -> str:
        """Return the reason of a failure, replaced if it names data that exist on this machine but not on the
        node."""
        if path := missing_data(reason, dict(RecordedSpec.parse(self.request.spec).config)):
            return (
                f"node {self.address(number)} has no {path}, which this machine has: data lie at the"
                " same absolute path on every node, or on a file system that all share"
            )
        return reason

    def _death(self, number: int, error: Exception) -> str:
        """Return why an actor does not answer; raise Unusable if it could not start this package's code."""
        if why := unusable(error):
            raise Unusable(self.actors.nodes[number], f"node {self.address(number)} {why}") from None
        if isinstance(error, self._ray.exceptions.RayTaskError):
            return f"its worker failed: {type(error.cause).__name__}: {error.cause}"
        node = self._node_of(self.actors.nodes[number])
        # The node itself is probed: Ray reports a lost node much later.
        if node and node["Alive"] and not silence(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"):
            return f"its worker died ({type(error).__name__})"
        self.lost_nodes.append(self.actors.nodes[number])
        return "its node is gone"

    def address(self, number: int) -> str:
        """Return the IP address of a node, by the number of its actor."""
        node = self._node_of(self.actors.nodes[number])
        return node["NodeManagerAddress"] if node else self.actors.nodes[number]

    def _scratch(self, number: int) -> "_BlockingCalls":
        return _BlockingCalls(self._ray, self.actors.actors[number])


class _BlockingCalls:
    """An actor's methods as blocking calls."""

    def __init__(self, ray: ModuleType, actor: "ActorHandle") -> None:
        self._ray, self._actor = ray, actor

    def __getattr__(self, name: str) -> Callable:
        method = getattr(self._actor, name)
        return lambda *arguments: self._ray.get(method.remote(*arguments), timeout=_PIECE_SECONDS)


def missing_data(reason: str, config: dict[str, object]) -> str | None:
    """Return the path of a workload's configuration that the reason of a failure calls missing, if it exists
    on this machine. The path of a file of code that a traceback passes through is none."""
    for path in _texts(config):
        named = any(phrase.format(path) in reason for phrase in _MISSING)
        if "/" in path and named and glob.glob(str(user_path(path))):
            return path
    return None


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _texts(value)
