"""Workers that do not trust each other: ``serializer="safe"``, with real processes.

In all workers of `safe_cluster` pickling and unpickling fail from the start, so every
test with it is also a test that nothing is ever unpickled, on any way that values, errors
or references take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import safe_functions as fn
from gradwire import rpc
from gradwire.errors import (
    EncodeError,
    HandshakeRefused,
    NotExported,
    RemoteError,
    UsageError,
)
from on_worker import on_worker
from strangers import Group, wait_logged

pytestmark = pytest.mark.multiproc


def on_safe_worker(body: Any) -> Any:
    return on_worker(0, fixture="safe_cluster")(body)


# ------------------------------------------------------------------------------- calls


@on_safe_worker
def test_exported_functions_are_called_by_object_or_by_name():
    x, y = torch.ones(2), torch.arange(2.0)
    assert rpc.rpc_sync("w1", fn.worker_name) == "w1"
    assert rpc.rpc_sync("w1", "safe_functions:worker_name") == "w1"
    assert torch.equal(rpc.rpc_sync("w1", torch.add, (x, y)), x + y)
    assert torch.equal(rpc.rpc_sync("w1", "torch:add", (x, y)), x + y)
    assert torch.equal(rpc.rpc_async("w1", torch.mul, (x, y)).wait(), x * y)
    assert torch.equal(rpc.rpc_sync("w1", "product", (x, y)), x * y)
    assert torch.equal(rpc.rpc_sync("w1", "safe_functions:coroutine", (x,)), x + 1)
    assert torch.equal(rpc.rpc_sync("w1", fn.add_later, ("w2", x, y)), x + y + 1)
    assert rpc.rpc_sync("w1", fn.call_on, ("w2", "safe_functions:worker_name")) == "w2"
    assert rpc.rpc_sync("w0", fn.worker_name) == "w0"


VALUES = [
    None,
    [1, (2, [3.5, "é\ud800"], ()), {"k": b"\x00", (1, 2): {4}}],
    {"deep": {"a": [None, True, 2**70, -(2**65), 1 + 2j]}},
    (torch.Size([2, 3]), torch.float16, torch.device("cpu"), frozenset({1})),
]


@pytest.mark.parametrize("value", VALUES, ids=["none", "mixed", "deep", "torch"])
@on_safe_worker
def test_plain_data_arrives_as_it_was_sent(value):
    found = rpc.rpc_sync("w1", fn.echo, ([value],))

    assert found == [value]
    assert fn.types_of(found) == fn.types_of([value])
    assert rpc.rpc_sync("w1", fn.types_of, ([value],)) == fn.types_of([value])
    assert rpc.rpc_sync("w1", fn.echo, (value,), {"k": value}) == (
        (value,),
        {"k": value},
    )


@on_safe_worker
def test_tensors_of_all_sizes_arrive_also_in_containers():
    for size in (8, 40_000, 1 << 18):
        sent = torch.randn(size)
        found = rpc.rpc_sync("w1", fn.echo, ({"a": [sent], "b": (sent,)},))
        assert torch.equal(found["a"][0], sent)
        assert found["a"][0] is found["b"][0]
    assert rpc.rpc_sync("w1", fn.are_same, ([sent], [sent])) is False
    assert rpc.rpc_sync("w1", fn.are_same, (sent, sent)) is True


@on_safe_worker
def test_other_values_are_refused_before_anything_is_sent():
    before = rpc.rpc_sync("w1", fn.calls_served)

    for value in (fn.OwnError("x"), [object()], {"f": fn.echo}, range(3)):
        with pytest.raises(EncodeError, match="tensors and plain data only"):
            rpc.rpc_sync("w1", fn.echo, (value,))
        with pytest.raises(EncodeError, match="tensors and plain data only"):
            rpc.remote("w1", fn.echo, (value,))

    assert rpc.rpc_sync("w1", fn.calls_served) == before + 1


@on_safe_worker
def test_results_that_are_no_plain_data_are_errors():
    with pytest.raises(EncodeError, match="OwnError") as caught:
        rpc.rpc_sync("w1", fn.return_something_else)

    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == "w1"


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "function",
    [
        fn.not_exported,
        "safe_functions:not_exported",
        "os:getpid",
        "builtins:eval",
        "builtins:exec",
        "gradwire.rpc._api:shutdown",
        "gradwire.wire._functions:resolve",
        "gradwire.rpc._rref:_find",
        "safe_functions:echo.__globals__",
        "this_module_is_never_imported:run",
        "torch:ops.aten.add",
        "",
    ],
    ids=lambda f: getattr(f, "__name__", f) or "empty",
)
@on_safe_worker
def test_what_is_not_exported_cannot_be_called(function):
    with pytest.raises(NotExported, match=r"'w0' asked for .* 'w1' has not exported"):
        rpc.rpc_sync("w1", function)
    with pytest.raises(NotExported, match=r"'w0' asked for .* 'w1' has not exported"):
        rpc.remote("w1", function).to_here()


@on_safe_worker
def test_functions_without_a_name_are_refused_by_the_caller():
    for function in (lambda: 1, fn.Counter().add, torch.nn.Linear(1, 1)):
        with pytest.raises(EncodeError, match=r"cannot be called on another worker"):
            rpc.rpc_sync("w1", function)
    with pytest.raises(TypeError, match="or the name of an exported one, found int"):
        rpc.rpc_sync("w1", 3)  # type: ignore[call-overload]


@on_safe_worker
def test_a_function_for_certain_peers_is_not_there_for_others():
    assert rpc.rpc_sync("w1", "only for w0") == "welcome"
    with pytest.raises(
        NotExported, match=r"'w1' asked for 'only for w0'.*'w2' has not"
    ):
        rpc.rpc_sync("w1", fn.call_on, ("w2", "only for w0"))


@on_worker(0)
def test_in_pickle_mode_a_name_is_still_an_error():
    with pytest.raises(TypeError, match=r"should be callable, found str.*'safe' only"):
        rpc.rpc_sync("w1", "torch:add", (1, 2))


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("value", ValueError, "bad value"),
        ("os", FileNotFoundError, "no such thing"),
        ("key", KeyError, "key"),
    ],
)
@on_safe_worker
def test_builtin_errors_keep_their_type(kind, error, text):
    with pytest.raises(error, match=text) as caught:
        rpc.rpc_sync("w1", fn.fail, (kind,))

    assert isinstance(caught.value, RemoteError)
    assert caught.value.worker == "w1"
    # It shows code and paths of the other party.
    assert caught.value.remote_traceback == ""
    assert "safe_functions.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("own", "safe_functions.OwnError: mine"),
        ("unicode", "builtins.UnicodeDecodeError: 'utf-8' codec"),
        ("exit", "builtins.SystemExit: 3"),
    ],
)
@on_safe_worker
def test_other_errors_arrive_as_text(kind, name):
    with pytest.raises(RemoteError) as caught:
        rpc.rpc_sync("w1", fn.fail, (kind,))

    assert type(caught.value) is RemoteError
    assert str(caught.value).startswith(name)


@pytest.mark.parametrize("way", [(), ("w2",)], ids=["at once", "on the way"])
@on_safe_worker
def test_key_that_was_not_found_is_quoted_once(way):
    with pytest.raises(KeyError) as caught:
        if way:
            rpc.rpc_sync("w1", fn.call_on, (*way, "safe_functions:fail", "key"))
        else:
            rpc.rpc_sync("w1", fn.fail, ("key",))

    assert caught.value.args == ("key",)


@on_safe_worker
def test_errors_pass_through_a_worker_in_between():
    with pytest.raises(ValueError, match="bad value") as caught:
        rpc.rpc_sync("w1", fn.call_on, ("w2", "safe_functions:fail", "value"))

    assert caught.value.worker == "w2"  # type: ignore[attr-defined]


# -------------------------------------------------------------------------- references


@on_safe_worker
def test_classes_are_made_and_used_through_references():
    counter = rpc.remote("w1", fn.Counter, (5,))

    assert counter.rpc_sync().add() == 6
    assert counter.rpc_async().add(number=2).wait() == 8
    assert counter.remote().add(1).to_here() == 9
    assert rpc.rpc_sync("w2", fn.read_counter, (counter,)) == 9
    assert counter.rpc_sync().again().rpc_sync().add() == 10
    assert rpc.rpc_sync("w2", fn.echo, ([counter],))[0].rpc_sync().add() == 10
    here = rpc.RRef(fn.Counter(1))
    assert rpc.rpc_sync("w1", fn.read_counter, (here,)) == 1
    assert here.rpc_sync().add() == 2
    with pytest.raises(ValueError, match="from a method"):
        counter.rpc_sync().raise_error()
    with pytest.raises(ValueError, match="bad value"):
        rpc.remote("w1", fn.fail, ("value",)).to_here()


@pytest.mark.parametrize(
    "name",
    ["_private", "_hidden", "__init__", "__reduce__", "__getattribute__", "count", "x"],
)
@on_safe_worker
def test_only_public_methods_are_reached_through_references(name):
    counter = rpc.remote("w1", fn.Counter)

    for call in (counter.rpc_sync, counter.rpc_async, counter.remote):
        with pytest.raises(NotExported, match="only public methods can be called"):
            result = call()._invoke(name)
            result = result.wait() if isinstance(result, rpc.Future) else result
            result.to_here()


@on_safe_worker
def test_values_of_other_classes_have_no_methods():
    hidden = rpc.rpc_sync("w1", fn.make_hidden)
    listed = rpc.rpc_sync("w1", fn.make_list)

    assert listed.to_here() == [1, 2]
    for rref, name in ((hidden, "method"), (listed, "append"), (listed, "__len__")):
        with pytest.raises(NotExported, match="only if the class"):
            rref.rpc_sync()._invoke(name)
    with pytest.raises(EncodeError, match="Hidden"):
        hidden.to_here()


@on_safe_worker
def test_ids_of_values_cannot_be_guessed():
    rref = rpc.rpc_sync("w1", fn.refer, (torch.ones(1),))
    rank, incarnation, number = rref._ref.id

    assert number > 1 << 40
    with pytest.raises(UsageError, match="'w0' asked for"):
        rpc.rpc_sync("w1", "gradwire.rpc._rref_service:find", (number,))
    for guess in (0, 1, 2, number - 1, number + 1):
        with pytest.raises(Exception, match="does not have the value"):
            rpc.rpc_sync("w1", "gradwire.rpc._rref:fetch", (rank, incarnation, guess))
    assert rref.to_here() == 1


# --------------------------------------------------------------------------- handshake


def join_other_group(rank: int, serializer: str, place: str) -> str:
    """The error with which this worker is turned away."""
    rpc.shutdown(graceful=False)
    options = rpc.RpcBackendOptions(
        init_method=place, init_timeout=20, serializer=serializer
    )
    try:
        rpc.init_rpc(f"x{rank}", rank, 2, options)
    except UsageError as error:
        return str(error)
    rpc.shutdown(graceful=False)
    return ""


def test_modes_do_not_mix_in_a_group(make_cluster, tmp_path):
    workers = [make_cluster(1) for _ in range(2)]
    place = f"file://{tmp_path}/store"

    texts = [
        workers[rank].start(0, join_other_group, rank, mode, place)
        for rank, mode in enumerate(["safe", "pickle"])
    ]

    for text in [call.result() for call in texts]:
        for fact in ("same option serializer", "'x0'", "'safe'", "'x1'", "'pickle'"):
            assert fact in text


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


@pytest.mark.parametrize("modes", [("safe", "pickle"), ("pickle", "safe")])
def test_the_handshake_refuses_the_other_mode(group, caplog, modes):
    first, first_record = group.add("w0", 0, 2, serializer=modes[0])
    second, second_record = group.add("w1", 1, 2, serializer=modes[1])
    for agent in (first, second):
        agent.network.set_members([first_record, second_record])

    with pytest.raises(HandshakeRefused, match="serializer='safe'") as caught:
        first.call("w1", "torch:add" if modes[0] == "safe" else torch.add, (1, 2))

    assert caught.value.code == "serializer"
    wait_logged(caplog, "(serializer)")  # on the other side
