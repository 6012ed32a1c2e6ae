"""Modules that live on other workers, used as if they were here.

Example:
    >>> model = nn.Sequential(RemoteModule("worker1", nn.Linear, (20, 30)), nn.ReLU())
    >>> model(torch.ones(128, 20)).sum().backward()
"""

from __future__ import annotations

from gradwire.nn._remote_module import RemoteModule, parameter_rrefs

__all__ = ["RemoteModule", "parameter_rrefs"]
