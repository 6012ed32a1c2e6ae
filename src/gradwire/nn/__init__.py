"""Modules that live on other workers, used as if they were here.

Example:
    On the first of two workers::

        model = nn.Sequential(RemoteModule("worker1", nn.Linear, (20, 30)), nn.ReLU())
        model(x).sum().backward()
"""

from __future__ import annotations

from gradwire.nn._remote_module import RemoteModule, parameter_rrefs

__all__ = ["RemoteModule", "parameter_rrefs"]
