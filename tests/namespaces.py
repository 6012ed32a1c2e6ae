"""Hosts for tests: network namespaces on a bridge, whose cables can be cut or made bad.

Unix sockets of one worker do not reach another in another namespace, so what passes
between them is TCP or TLS. The bridge has a namespace of its own: nothing of this touches
the network of the machine, and all of it goes with the namespaces.

Needs the commands `ip` and `tc` (Debian: iproute2) and the right to make namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from typing import Literal

LIMIT_S = 30.0
CLONE_NEWNET = 0x40000000
INTERFACE = "veth0"
"""Its name in every host."""

Disturbance = Literal["slow", "lossy"]
_DISTURBANCES: dict[Disturbance, tuple[str, ...]] = {
    "slow": ("netem delay 20ms 10ms", "tbf rate 1mbit burst 3k limit 12k"),
    "lossy": ("netem loss 10%", "tbf rate 2mbit burst 3k limit 4k"),
}


class NotPermitted(Exception):
    """Hosts cannot be made here; the text says why."""


def enter(name: str) -> None:
    """Moves the calling thread, and those that it starts, into a namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)


class Hosts:
    """Some hosts in one network.

    Args:
        number: How many.

    Raises:
        NotPermitted: They cannot be made here; nothing is left behind.
    """

    def __init__(self, number: int) -> None:
        for command in ("ip", "tc"):
            if shutil.which(command) is None:
                raise NotPermitted(f"the command {command!r} (iproute2) is missing")
        prefix = f"gradwire{os.getpid()}c"
        self._bridge = f"{prefix}b"
        self.names = [f"{prefix}{index}" for index in range(number)]
        self._made: list[str] = []
        try:
            self._make(self._bridge)
            _ip(f"-n {self._bridge} link add br0 type bridge")
            _ip(f"-n {self._bridge} link set br0 up")
            for index, name in enumerate(self.names):
                self._make(name)
                self._plug_in(index, name)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            reason = getattr(error, "stderr", None) or error
            raise NotPermitted(
                f"network namespaces cannot be made here: {reason}"
            ) from error

    def _make(self, name: str) -> None:
        _ip(f"netns add {name}")
        self._made.append(name)
        _ip(f"-n {name} link set lo up")

    def _plug_in(self, index: int, name: str) -> None:
        end = f"port{index}"
        _ip(
            f"link add {INTERFACE} netns {name} type veth "
            f"peer name {end} netns {self._bridge}"
        )
        _ip(f"-n {self._bridge} link set {end} master br0 up")
        _ip(f"-n {name} address add {self.address(index)}/24 dev {INTERFACE}")
        _ip(f"-n {name} link set {INTERFACE} up")

    def address(self, index: int) -> str:
        return f"10.214.7.{index + 1}"

    def cut(self, index: int) -> None:
        """From now on nothing passes to or from this host, and nobody is told."""
        _ip(f"-n {self._bridge} link set port{index} nomaster")

    def mend(self, index: int) -> None:
        _ip(f"-n {self._bridge} link set port{index} master br0")

    def disturb(self, index: int, how: Disturbance) -> str:
        """Makes what leaves this host slow, or loses some of it.

        Netem does that at random. A kernel without it (some small ones) gets a narrow
        link instead, with a long queue or with one that overflows.

        Returns:
            What was set, for the log.

        Raises:
            NotPermitted: The kernel has neither.
        """
        reason = ""
        for setting in _DISTURBANCES[how]:
            try:
                _tc(self.names[index], "replace", setting)
            except subprocess.CalledProcessError as error:
                reason = error.stderr
            else:
                return setting
        raise NotPermitted(f"tc cannot make links {how} here: {reason}")

    def calm(self, index: int) -> None:
        """Ends what `disturb` began."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _tc(self.names[index], "delete")

    def close(self) -> None:
        """Removes everything; links go with their namespaces."""
        for name in self._made:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _ip(f"netns delete {name}")
        self._made.clear()


def _ip(arguments: str) -> None:
    _run(f"ip {arguments}")


def _tc(namespace: str, action: str, setting: str = "") -> None:
    _run(f"tc -n {namespace} qdisc {action} dev {INTERFACE} root {setting}")


def _run(command: str) -> None:
    subprocess.run(
        command.split(), check=True, capture_output=True, timeout=LIMIT_S, text=True
    )
