"""The agent's threads: they wait for descriptors, and run what must run.

Leader and followers: one thread waits in the poller, and does what comes itself; there is
no hand-off. The others wait in reserve for their turn to lead (see `_lead`). Whoever is
about to run foreign code (a handler, a callback) first makes sure that somebody is left
there. So the pool grows while handlers block, and nothing that they do keeps a reply or
a heartbeat from being read for long.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gradwire.rpc._lead import Lead
from gradwire.rpc._log import log as _log
from gradwire.rpc._poller import Event, make_poller
from gradwire.rpc._signals import may_be_of_a_signal
from gradwire.rpc._turn import LONGEST_TURN_S, let_others_read, set_helper

if TYPE_CHECKING:
    from gradwire.rpc._link import Link

__all__ = ["WorkerPool"]

_IDLE_S = 10.0


class _Local(threading.local):
    is_pool_thread = False


class WorkerPool:
    """Threads that serve descriptors and a queue of work.

    Args:
        name: Prefix of the threads' names.
        keep_idle: How many idle threads stay; more of them end after some seconds.
        on_work: Called when work was submitted; `check_stall` must be called soon.

    Attributes:
        num_idle: How many of its threads wait.
    """

    def __init__(self, name: str, keep_idle: int, on_work: Callable[[], None]) -> None:
        self._name = name
        self._on_work = on_work
        self._num_begun = self._num_begun_before = 0
        self._num_wakes = 1  # how many threads to wake when the queue is stuck
        self._num_helped = 0  # what was begun by those whom the last look has woken
        self._keep_idle = keep_idle
        self.poller = self.reserve = make_poller()
        fileno = self.poller.fileno()
        watch: Callable[[bool], None] | None = None
        if fileno is not None:
            self.reserve = make_poller()
            self.reserve.add(fileno)
            watch = functools.partial(self.reserve.arm, fileno, write=False)
        self._lead = Lead(watch)
        self.poller_fileno = fileno
        self._reserved: set[int] = set()
        self._callbacks: dict[int, Callable[[bool, bool], None]] = {}
        self._queue: deque[Callable[[], None]] = deque()
        # Guards `_threads`, `num_idle`, `_count` and `_closed`; touched by all threads of
        # the pool and by those that submit.
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self.num_idle = 0
        self._count = 0
        self._closed = False
        self._local = _Local()
        # By thread: since when it has been at a piece of work of the queue.
        self._working_since: dict[int, float] = {}
        self._num_wanted = 0  # threads that shall work at the queue at the same time

    # --------------------------------------------------------------- descriptors

    def watch(
        self,
        fileno: int,
        callback: Callable[[bool, bool], None],
        *,
        in_reserve: bool = False,
    ) -> None:
        """Calls ``callback(readable, writable)`` on a pool thread for each event.

        The descriptor starts unarmed; see `Poller.arm`. A callback that raises is
        logged, and nothing else happens.

        Args:
            fileno: The descriptor.
            callback: What to call.
            in_reserve: It is in the poller ``reserve``, and called even if whoever leads
                is stuck.
        """
        self._callbacks[fileno] = callback
        if in_reserve:
            self._reserved.add(fileno)
            self.reserve.add(fileno)
        else:
            self.poller.add(fileno)

    def unwatch(self, fileno: int) -> None:
        """Forgets the descriptor; call it before closing it."""
        if self._callbacks.pop(fileno, None) is not None:
            if fileno in self._reserved:
                self._reserved.discard(fileno)
                self.reserve.remove(fileno)
            else:
                self.poller.remove(fileno)

    # ----------------------------------------------------------------------- work

    @property
    def is_pool_thread(self) -> bool:
        """Whether the current thread is one of this pool."""
        return self._local.is_pool_thread

    @property
    def has_work(self) -> bool:
        """Whether something waits in the queue."""
        return bool(self._queue)

    def start(self) -> None:
        """Starts the first threads."""
        with self._lock:
            for _ in range(2):
                problem = self._spawn()
                if problem is not None:
                    raise problem

    def submit(self, *work: Callable[[], None]) -> None:
        """Runs each piece of work on some thread of the pool.

        When that is closed, and its threads have ended, it is run here.
        """
        if not work:
            return
        self._queue.extend(work)
        self._call_for_help()
        if self._closed and not self._threads:
            self._drain()
        else:
            self._on_work()

    def check_stall(self) -> bool:
        """Lets others go on if whoever leads, or the queue, is stuck.

        Returns:
            Whether it has to be called again soon.
        """
        leader = self._lead.holder
        since = self._working_since.get(leader)
        if since is not None and time.monotonic() - since > LONGEST_TURN_S:
            self.depose(leader)
        if not self._queue:
            self._num_wakes, self._num_helped = 1, 0
            return since is not None
        if self._num_begun - self._num_begun_before > self._num_helped:
            self._num_wakes, self._num_helped = 1, 0
        else:
            # More and more: who comes may get stuck as well, and one more that it wakes.
            self._num_helped = self._num_wakes + 1
            self._num_wanted = self._num_wakes
            for _ in range(self._num_wakes):
                self._call_for_help()
            self.depose(leader)
            self._num_wakes = min(2 * self._num_wakes, 64)
        self._num_begun_before = self._num_begun
        return True

    @property
    def leads(self) -> bool:
        """Whether the current thread leads; see `_lead`."""
        lead = self._lead
        return lead.holder == threading.get_ident() or lead.is_shared

    def resign(self) -> None:
        """The current thread is about to do something that takes its time."""
        me = threading.get_ident()
        if self._lead.holder == me:
            self.depose(me)

    def depose(self, thread: int) -> None:
        """A thread takes long: if it leads, another one shall when there is something."""
        if self._lead.depose(thread):
            self.ensure_follower()
            if self._queue:
                self.poller.wake()

    def _help_with_rest(self) -> None:
        """The current thread reads something else: others go on with the queue."""
        if self._queue:
            self.resign()
            self._call_for_help()

    def ensure_follower(self) -> None:
        """Makes sure that another thread waits; to be called before foreign code."""
        if self.num_idle == 0:
            with self._lock:
                if self.num_idle == 0 and not self._closed:
                    self._spawn()

    def _call_for_help(self) -> None:
        with self._lock:
            if self._closed:
                return  # nobody is left, or all are awake
            if self.num_idle == 0:
                self._spawn()
            else:
                self.poller.wake()

    def _spawn(self) -> RuntimeError | None:
        """Starts a thread; returns why not. The caller holds the lock."""
        # Counted as idle at once, so that two callers do not both spawn.
        self.num_idle += 1
        self._count += 1
        thread = threading.Thread(
            target=self._run, name=f"gradwire-{self._name}-{self._count}", daemon=True
        )
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # a limit of the system, perhaps for now only
            self.num_idle -= 1
            self._threads.discard(thread)
            _log.warning("%s: no thread can be started: %s", self._name, error)
            return error
        return None

    def _run(self) -> None:
        self._local.is_pool_thread = True
        # Torch tells a new thread how many threads it may compute with, as the program has
        # set it, only when somebody asks there; before, it takes all cores.
        torch.get_num_threads()
        set_helper(self._help_with_rest, self.resign)
        is_counted = True
        try:
            while not self._closed:
                event = None
                if not self._lead.claim():
                    event = self.reserve.wait(_IDLE_S)
                elif not self._queue:
                    event = self.poller.wait(_IDLE_S)
                    if event is None and self._queue and not self._lead.is_mine:
                        self.poller.wake()  # it was meant for who leads now
                with self._lock:
                    self.num_idle -= 1
                try:
                    if event is not None:
                        self.handle(event)
                    worked = self._drain()
                finally:
                    with self._lock:
                        self.num_idle += 1
                if event is None and not worked and self._leaves():
                    is_counted = False
                    return
            self._drain()  # others may wait for what nobody has come to
        finally:
            if is_counted:
                with self._lock:
                    self.num_idle -= 1
            self.resign()  # while the thread is in the set, the pollers are open
            with self._lock:
                self._threads.discard(threading.current_thread())
                is_last = self._closed and not self._threads
            if is_last:
                self._drain()
                self._close_pollers()

    def _leaves(self) -> bool:
        """Whether the current thread is one too many; then it counts no more."""
        with self._lock:
            if self.num_idle <= self._keep_idle and not self._closed:
                return False
            self.num_idle -= 1
            return True

    def handle(self, event: Event) -> None:
        """Calls what watches a descriptor, on the current thread."""
        callback = self._callbacks.get(event.fileno)
        if event.fileno == self.poller_fileno:
            self._lead.was_called()
        elif callback is not None:
            self._guard(lambda: callback(event.readable, event.writable))

    def link_at(self, fileno: int) -> Link | None:
        """The connection with a descriptor, if it is one of ours."""
        owner = getattr(self._callbacks.get(fileno), "__self__", None)
        return owner if hasattr(owner, "take_pools_turn") else None

    def _drain(self) -> bool:
        """Runs what is in the queue; help comes if a piece blocks, see `_turn`."""
        worked = False
        me = threading.get_ident()
        while self._queue and (self._closed or self._lead.is_mine):
            # First of all: a look that finds the queue empty must see that somebody works.
            self._working_since[me] = time.monotonic()
            try:
                work = self._queue.popleft()
                worked = True
                self._num_begun += 1
                self.ensure_follower()
                if self._num_wanted > 0:
                    self._num_wanted -= 1
                    self.resign()
                self._guard(work)
            except IndexError:  # another thread was faster
                break
            finally:
                del self._working_since[me]
            del work  # it may hold tensors that the peer waits to get back
        return worked

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            if may_be_of_a_signal(error):  # whoever submits runs it, after the end
                raise
            _log.exception("%s: an internal task failed", self._name)
        finally:
            let_others_read()

    # ------------------------------------------------------------------------ end

    @property
    def num_threads(self) -> int:
        """How many threads the pool has."""
        return len(self._threads)

    def close(self, timeout_s: float) -> list[str]:
        """Ends all threads.

        Returns:
            The names of those that were still busy after ``timeout_s``.
        """
        limit = time.monotonic() + timeout_s
        with self._lock:
            was_closed, self._closed = self._closed, True
            me = threading.current_thread()
            threads = [t for t in self._threads if t is not me]
            # The last thread that leaves closes the poller; it needs the lock for that.
            if self._threads:
                self.poller.wake_all()
                self.reserve.wake_all()
            elif not was_closed:
                self._close_pollers()
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))
        return [t.name for t in threads if t.is_alive()]

    def _close_pollers(self) -> None:
        self.poller.close()
        if self.reserve is not self.poller:
            self.reserve.close()
