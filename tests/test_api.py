"""Public names, frozen: a change here is a change that users see."""

from __future__ import annotations

import pickle

import pytest

from gradwire import errors

ERROR_NAMES = [
    "CallTimeout",
    "ClosedError",
    "ConnectError",
    "ConnectTimeout",
    "DeadlineExceeded",
    "DecodeError",
    "EncodeError",
    "GradwireError",
    "HandshakeRefused",
    "InvalidWorkerName",
    "LocalProtocolError",
    "NotInitialized",
    "PeerLostError",
    "ProtocolError",
    "RemoteError",
    "RemoteProtocolError",
    "SerializationError",
    "ShutdownTimeout",
    "TransportError",
    "UnknownWorker",
    "UsageError",
    "VersionMismatch",
]

BUILTIN_BASES = {
    "UsageError": RuntimeError,
    "InvalidWorkerName": ValueError,
    "DeadlineExceeded": TimeoutError,
}


def all_errors():
    found, queue = [], [errors.GradwireError]
    while queue:
        found.append(queue.pop())
        # Other modules may derive from the tree; what they add is theirs to freeze.
        queue += [
            c for c in found[-1].__subclasses__() if c.__module__ == errors.__name__
        ]
    return sorted(found, key=lambda error: error.__name__)


def test_errors_exports_are_frozen():
    assert errors.__all__ == ERROR_NAMES


def test_errors_exports_are_the_whole_tree():
    assert [error.__name__ for error in all_errors()] == ERROR_NAMES


@pytest.mark.parametrize("name", sorted(BUILTIN_BASES))
def test_error_derives_from_builtin(name):
    assert issubclass(getattr(errors, name), BUILTIN_BASES[name])


@pytest.mark.parametrize("error_type", all_errors(), ids=lambda error: error.__name__)
def test_error_survives_pickle(error_type):
    error = error_type("expected this, found that", worker="w1")
    error.fact = ("kept", 1)

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is error_type
    assert copy.args == error.args
    assert str(copy) == str(error) == "expected this, found that"
    assert copy.worker == "w1"
    assert copy.__dict__ == error.__dict__


def test_remote_error_shows_traceback_after_pickle():
    error = errors.RemoteError("ValueError: bad", worker="w2")
    error.remote_type = "builtins.ValueError"
    error.remote_traceback = "Traceback of the worker\n"

    copy = pickle.loads(pickle.dumps(error))

    assert copy.remote_type == "builtins.ValueError"
    assert (
        str(copy)
        == "ValueError: bad\n\nRaised on worker 'w2':\nTraceback of the worker"
    )
