"""One trial in flight on its crew: from the first question to its end, as one course that never blocks."""

import glob
import json
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from ablate.execution.messages import Ended, Message, TrialRequest, Waiting
from ablate.execution.workers.actor import Left, versions
from ablate.execution.workers.apart import Mirror
from ablate.execution.workers.cluster import skew, unusable
from ablate.execution.workers.crew import NODE_GONE, Crew
from ablate.files import full

_LAST_WORD_SECONDS = 15.0
"""Within which the rest of a gang ends by itself, once one of its nodes is done."""
_COURIER_SHARE = 10
"""A checkpoint is fetched after so many times as long as the last one took, or when the trial writes them."""
_LEAST_FETCH_SECONDS = 1.0
_MISSING = ("No such file or directory", "no file matches", "no such folder")
"""How a trial's reason tells of data that are not there."""
_PIECE_SECONDS = 120.0
"""A worker that has not answered by then is lost."""

Waits = list[Any]
"""References that something will come by; empty: a thread, or a lock, is waited for."""


class Unusable(Exception):
    """A node that cannot run this sweep's trials; why, and what would be right."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(why)
        self.node = node


class Flight:
    """A trial on its way. `pump` it until it is `over`."""

    def __init__(
        self, ray: Any, request: TrialRequest, crew: Crew, nonce: str, courier: Executor, node_of: Callable
    ) -> None:
        self._ray, self.request, self.crew, self._courier, self._node_of = (
            ray,
            request,
            crew,
            courier,
            node_of,
        )
        self.over = False
        self.broken = False
        """Whether an actor of its crew is gone."""
        self.heard: dict[int, float] = {}
        """When each actor last said something, from its first word on: it says that it lives, in silence too."""
        self.gone: list[str] = []
        """Nodes that do not answer any more."""
        self.sees: bool | None = None
        """Whether all of its crew see the state folder; None: not known yet."""
        self.compiled = True
        """Whether all of its crew have the compiled quantisers, as far as is known."""
        self._ready: set[Any] = set()
        self._out: list[Message] = []
        self._asked: dict[Any, int] = {}
        self._ended: dict[int, tuple[Ended, Left]] = {}
        self._last_word: float | None = None
        self._mirror: Mirror | None = None
        self._stopped = False
        self._took = 0.0
        self._course = self._run(nonce)

    @property
    def address(self) -> str:
        """Of the first node of its crew."""
        return self._address(0)

    @property
    def started(self) -> bool:
        """Whether it holds its places: its crew has been there."""
        return self.sees is not None

    def pump(self, ready: set[Any]) -> tuple[list[Message], Waits]:
        """Go on as far as possible; what the controller is to be told, and what it waits for."""
        self._ready, self._out, waits = ready, [], []
        try:
            waits = next(self._course)
        except StopIteration:
            self.over = True
        except self._ray.exceptions.RayError as error:
            self.broken = self.over = True
            number = next((self._asked[ref] for ref in self._asked if ref in ready), 0)
            self._out.append(
                Ended("failed", self._why(number, error), disk_full=full(getattr(error, "cause", None)))
            )
        finally:
            if self.over and self._mirror:
                self._mirror.close()
        return self._out, waits

    def stop(self) -> None:
        """End it; its end is told."""
        self._stopped = True
        for actor in self.crew.actors if self._asked else ():
            actor.stop.remote()

    def leave(self) -> None:
        """Let go of it without another word."""
        self._course.close()
        if self._mirror:
            self._mirror.close()

    # The course

    def _run(self, nonce: str) -> Generator[Waits, None, None]:
        facts = yield from self._places(nonce)
        if not facts:
            self.broken = True  # it may still wait for its places
            self._out.append(Ended("failed", "stopped"))
            return
        self.sees, self.compiled = (all(fact[what] for fact in facts) for what in ("sees", "compiled"))
        if not self.sees:
            self._mirror = Mirror(self.request)
            yield from self._claimed(self._mirror)
            if finished := self._mirror.finished():
                self._out += finished
                return
            yield from self._thread(
                self._mirror.give, [self._far(number) for number in range(len(self.crew.actors))]
            )
        if self._stopped:
            self._out.append(Ended("failed", "stopped"))
            return
        yield from self._begin(self.crew.requests(self.request, facts))
        self._asked = {actor.hear.remote(): number for number, actor in enumerate(self.crew.actors)}
        yield from self._listen()

    def _begin(self, requests: list[TrialRequest]) -> Iterator[Waits]:
        """Have every actor start. An actor's calls may overtake each other, so nothing else is asked of it before."""
        pairs = zip(self.crew.actors, requests, strict=True)
        self._asked = {
            actor.start.remote(request, not self.sees): number
            for number, (actor, request) in enumerate(pairs)
        }
        yield from self._all_there()
        if self._stopped:  # meanwhile
            self.stop()

    def _all_there(self) -> Iterator[Waits]:
        """Wait for every answer; raises for an actor that died, while others are still waited for."""
        late = list(self._asked)
        while late:
            self._ray.get([ref for ref in late if ref in self._ready])
            late = [ref for ref in late if ref not in self._ready]
            if late:
                yield late

    def _places(self, nonce: str) -> Generator[Waits, None, list[dict[str, Any]]]:
        """Wait until all actors are there; returns what they are, nothing where it was stopped. Unusable where versions differ."""
        self._asked = {
            actor.look.remote(self.request.root, nonce): number
            for number, actor in enumerate(self.crew.actors)
        }
        looks = list(self._asked)
        for waits in self._all_there():
            if self._stopped:
                return []
            yield waits
        facts = self._ray.get(looks)
        self.crew.nodes = [fact["node"] for fact in facts]
        for node, fact in zip(self.crew.nodes, facts, strict=True):
            if why := skew(versions(), fact["versions"]):
                raise Unusable(node, f"node {fact['address']} {why}")
        return facts

    def _claimed(self, mirror: Mirror) -> Iterator[Waits]:
        """Wait until the trial is this attempt's."""
        told = False
        while (holder := mirror.claim()) and not self._stopped:
            if not told:
                self._out.append(Waiting(holder))
                told = True
            yield []

    def _thread(self, call: Callable, *words: Any) -> Generator[Waits, None, Any]:
        """Wait for a call in another thread; returns what it returns, raises what it raises."""
        future = self._courier.submit(call, *words)
        while not future.done():
            yield []
        return future.result()

    def _listen(self) -> Iterator[Waits]:
        """Pass on what the first actor says, until all have ended."""
        left: Left = {}
        fetching, due = None, 0.0
        while len(self._ended) < len(self.crew.actors):
            for ref in [ref for ref in self._asked if ref in self._ready]:
                number = self._asked[ref]
                messages, listed = self._ray.get(ref)
                del self._asked[ref]
                if messages:
                    self.heard[number] = time.monotonic()
                if number == 0 and not self._hear(messages):
                    return
                left = listed if number == 0 and messages else left
                end = next((message for message in messages if isinstance(message, Ended)), None)
                if end:
                    del self.heard[number]
                    self._end(number, end, left)
                else:
                    self._asked[self.crew.actors[number].hear.remote()] = number
            if self._mirror and 0 not in self._ended:
                fetching, due = self._fetch(self._mirror, left, fetching, due)
            if self._last_word and time.monotonic() > self._last_word:
                self.broken = True  # who has not ended by now is ended with its actor
                break
            yield list(self._asked)
        while fetching and not fetching.done():
            yield []
        end, left = self._verdict()
        if self._mirror and 0 in self._ended:
            end = yield from self._thread(self._mirror.finish, self._far(0), end, left)
        self._out.append(end)

    def _hear(self, messages: list[Message]) -> bool:
        """Pass messages on, through the store where the trial runs apart; whether this attempt may go on."""
        for message in messages:
            if isinstance(message, Ended):
                continue
            if not self._mirror:
                self._out.append(message)
                continue
            try:
                self._out += self._mirror.hear(message)
            except PermissionError as error:
                self.broken = True
                self._out.append(Ended("failed", str(error)))
                return False
        return True

    def _fetch(
        self, mirror: Mirror, left: Left, fetching: Future | None, due: float
    ) -> tuple[Future | None, float]:
        """Have what the trial leaves brought here now and then: at once what others wait for, its own in measure."""
        if fetching and not fetching.done():
            return fetching, due
        if fetching:
            fetching.result()
        names, now = mirror.wanted(left), time.monotonic()
        names = [name for name in names if now >= due or name.startswith("checkpoints/")]
        if not names:
            return None, due
        pause = max(_LEAST_FETCH_SECONDS, self.request.telemetry.get("checkpoint", 60.0) / 2)
        return self._courier.submit(self._timed_fetch, mirror, names), now + max(
            pause, _COURIER_SHARE * self._took
        )

    def _timed_fetch(self, mirror: Mirror, names: list[str]) -> None:
        began = time.monotonic()
        mirror.fetch(self._far(0), names)
        self._took = time.monotonic() - began

    # Its end

    def _end(self, number: int, end: Ended, left: Left) -> None:
        """One node of the crew is done. The others have a moment to end by themselves, and are stopped where they do not."""
        self._ended[number] = end, left
        if len(self._ended) < len(self.crew.actors) and self._last_word is None:
            self._last_word = time.monotonic() + _LAST_WORD_SECONDS

    def _verdict(self) -> tuple[Ended, Left]:
        """The crew's end: its first node's result; without one, what went wrong first, wherever that was."""
        first, left = self._ended.get(0, (Ended("failed", "its first node did not end with the others"), {}))
        if first.result is not None:
            return first, left
        ends = [(number, end) for number, (end, _) in self._ended.items() if end.result is None]
        number, end = next(
            (item for item in ends if item[1].status == "oom"), ends[0] if ends else (0, first)
        )
        return replace(end, reason=self._explained(number, end.reason or "")), left

    def _explained(self, number: int, reason: str) -> str:
        """Why a trial failed; of data that lie here alone, where they should lie."""
        workload = json.loads(self.request.spec)["workload"]
        path = next(
            (
                text
                for text in _texts(workload)
                if "/" in text and text in reason and glob.glob(str(Path(text).expanduser()))
            ),
            None,
        )
        if path is None or not any(words in reason for words in _MISSING):
            return reason
        return (
            f"node {self._address(number)} has no {path}, which this machine has: data lie at the same absolute path on every node, or on a"
            " file system that all share"
        )

    def _why(self, number: int, error: Exception) -> str:
        if why := unusable(error):
            raise Unusable(self.crew.nodes[number], f"node {self._address(number)} {why}") from None
        if isinstance(error, self._ray.exceptions.RayTaskError):
            return f"its worker failed: {type(error.cause).__name__}: {error.cause}"
        why = self.crew.why_gone(number, error, self._node_of)
        self.gone += [self.crew.nodes[number]] if why == NODE_GONE else []
        return why

    def _address(self, number: int) -> str:
        node = self._node_of(self.crew.nodes[number])
        return node["NodeManagerAddress"] if node else self.crew.nodes[number]

    def _far(self, number: int) -> "_Waited":
        return _Waited(self._ray, self.crew.actors[number])


class _Waited:
    """An actor's calls, waited for."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def __getattr__(self, name: str) -> Callable:
        return lambda *words: self._ray.get(getattr(self._actor, name).remote(*words), timeout=_PIECE_SECONDS)


def _texts(content: Any) -> Iterator[str]:
    """Every text in a nest of mappings and lists."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _texts(value)
