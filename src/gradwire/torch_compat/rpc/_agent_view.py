"""The agent of this process, as programs for torch look at it."""

from __future__ import annotations

import time
from typing import Any

import gradwire.rpc
from gradwire._ids import check_worker_name
from gradwire.torch_compat import _core

__all__ = ["RpcAgent", "WorkerInfo", "enable_gil_profiling"]


class WorkerInfo(gradwire.rpc.WorkerInfo):
    """Name and rank of a worker. Checks the name, as torch does."""

    __slots__ = ()

    def __new__(cls, name: str, id: int) -> WorkerInfo:
        """Makes one; a name that no worker can have is an error."""
        return super().__new__(cls, check_worker_name(name), id)

    def __reduce__(self) -> Any:
        return WorkerInfo, (self.name, self.id)


class _GilWatch:
    """How long a thread that let the interpreter go waits to get it back, on average."""

    def __init__(self) -> None:
        self.is_on = False
        self._waited_s = 0.0
        self._count = 0

    def look(self) -> float:
        """Looks once more; the average so far, in microseconds."""
        start = time.perf_counter()
        time.sleep(0)
        self._waited_s += time.perf_counter() - start
        self._count += 1
        return self._waited_s / self._count * 1e6


_gil = _GilWatch()


def enable_gil_profiling(flag: bool) -> None:
    """Whether debug information tells how long threads wait for the interpreter."""
    _gil.is_on = flag


class RpcAgent:
    """What programs for torch may ask an agent."""

    def __init__(self, agent: _core.Agent) -> None:
        self._agent = agent

    @property
    def is_static_group(self) -> bool:
        """Whether the size of the group was fixed from the beginning."""
        return not _core.is_open_group()

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Name and rank of a worker, by default of this one."""
        if worker is None:
            return WorkerInfo(*self._agent.info)
        return WorkerInfo(*_core.find_worker(self._agent, worker))

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the group, by rank."""
        return [WorkerInfo(*info) for info in _core.worker_infos(self._agent)]

    def get_debug_info(self) -> dict[str, str]:
        """Counts of what is there, under torch's names."""
        counts = self._agent.debug_info()
        info = {
            "agent.thread_pool_size": self._agent.options.num_worker_threads,
            "agent.num_idle_threads": counts["idle_threads"],
            "agent.client_active_calls": counts["client_active_calls"],
            "agent.server_active_calls": counts["server_active_calls"],
            "agent.server_active_async_calls": counts["server_active_calls"],
        }
        if _gil.is_on:
            info["agent.gil_average_wait_time_us"] = _gil.look()
        return {key: str(value) for key, value in info.items()}
