"""Starting workers: from a notebook or a test, or with the command ``gradwire run``.

Example:
    >>> from gradwire import launch, rpc
    >>> launch.spawn({"boss": ask}, roles={"boss": 1, "helper": 2})["boss"]
    ['helper:0', 'helper:1']
"""

from __future__ import annotations

from gradwire.launch._roles import Worker, this_worker
from gradwire.launch._spawn import spawn

__all__ = ["Worker", "spawn", "this_worker"]
