"""Starting workers: from a notebook or a test, or with the command ``gradwire run``.

Example:
    >>> spawn({"boss": get_workers}, roles={"boss": 1, "helper": 2})["boss"]
    [WorkerInfo(id=0, name=boss), WorkerInfo(id=1, name=helper:0), ...]
"""

from __future__ import annotations

from gradwire.launch._roles import Worker, this_worker
from gradwire.launch._spawn import main, spawn

__all__ = ["Worker", "main", "spawn", "this_worker"]
