"""References between real workers. Every test ends with a look at all of them: the values
that it made are gone, and nobody remembers anything of them.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import functions
import probes
import rref_functions as fn
from cluster import Cluster
from gradwire import rpc
from gradwire.errors import (
    CallTimeout,
    DecodeError,
    EncodeError,
    GradwireError,
    OwnerLost,
    PeerLostError,
    RemoteError,
    UnknownWorker,
    UsageError,
)
from gradwire.rpc import RRef
from gradwire.rpc._api import current_agent
from gradwire.rpc._rref import _service_of
from gradwire.rpc._rref_parts import Packed, User
from on_worker import on_worker
from rref_functions import Counter, MyError, catch

pytestmark = pytest.mark.multiproc

ALL = ("w0", "w1", "w2", "w3")
NUM_FINALISERS = 1000


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from fn.clean(request)


# --------------------------------------------------------------------- what it refers to


@on_worker(0)
def test_remote_refers_to_a_result_that_stays_there():
    rref = rpc.remote("w1", functions.get_pid)

    assert rref.to_here() == rpc.rpc_sync("w1", functions.get_pid)


@pytest.mark.parametrize("to", ["w1", 1, "info"])
@on_worker(0)
def test_remote_takes_all_names_of_a_worker(to):
    target = rpc.get_worker_info("w1") if to == "info" else to

    assert rpc.remote(target, fn.Counter).owner_name() == "w1"


@on_worker(0)
def test_remote_takes_keyword_arguments():
    rref = rpc.remote("w1", functions.echo, (1,), {"b": 2})

    assert rref.to_here() == ((1,), {"b": 2})


@on_worker(0)
def test_owner_is_known_on_both_sides():
    rref = rpc.remote("w1", Counter)

    assert not rref.is_owner()
    assert rref.owner_name() == "w1"
    assert rref.owner() == rpc.get_worker_info("w1")
    assert rpc.rpc_sync("w1", fn.describe, args=(rref,)) == (True, "w1", True)


@on_worker(0)
def test_own_reference_keeps_the_identity_of_any_value():
    for value in (
        [1, 2],
        {"a": 1},
        (1, [2]),
        5,
        "text",
        None,
        Counter(),
        torch.ones(2),
    ):
        rref = RRef(value)

        assert rref.is_owner()
        assert rref.confirmed_by_owner()
        assert rref.owner() == rpc.get_worker_info()
        assert rref.local_value() is value
        assert rref.to_here() is value


@on_worker(0)
def test_identity_survives_the_way_to_others_and_back():
    value = [1, 2]
    rref = RRef(value)

    back = rpc.rpc_sync("w1", functions.echo, args=(rref,))

    assert back.is_owner()
    assert back.local_value() is value


@on_worker(0)
def test_value_of_another_worker_is_copied_each_time():
    rref = rpc.remote("w1", functions.echo, args=([1, 2],))

    assert rref.to_here() == rref.to_here() == [1, 2]
    assert rref.to_here() is not rref.to_here()


@on_worker(0)
def test_local_value_is_for_the_owner():
    rref = rpc.remote("w1", Counter)

    error = catch(UsageError, rref.local_value)
    assert "'w0'" in str(error)
    assert "'w1'" in str(error)
    assert "to_here()" in str(error)


@on_worker(0)
def test_value_that_is_not_shared_does_not_count():
    rref = RRef(1)

    assert fn.counts() == {}
    del rref


@on_worker(0)
def test_value_none_is_a_value():
    assert rpc.remote("w1", functions.echo, args=(None,)).to_here() is None


@on_worker(0)
def test_remote_to_oneself_keeps_the_identity():
    value = Counter()
    fn.keep("value", value)

    rref = rpc.remote("w0", fn.give, args=("value",))

    assert rref.is_owner()
    assert rref.to_here() is value


@on_worker(0)
def test_repr_says_who_owns_it():
    assert repr(RRef(1)).startswith("OwnerRRef(")
    assert "owner='w1'" in repr(rpc.remote("w1", Counter))


@on_worker(0)
def test_reference_becomes_confirmed():
    rref = rpc.remote("w1", fn.wait_and_make, args=("made", 5))
    rpc.rpc_sync("w1", functions.wait_until_blocked, args=("made",))
    assert not rref.confirmed_by_owner()

    rpc.rpc_sync("w1", functions.set_event, args=("made",))

    assert rref.to_here() == 5
    fn.wait_until(rref.confirmed_by_owner)


@on_worker(0)
def test_reference_from_its_owner_is_confirmed_at_once():
    rref = rpc.rpc_sync("w1", fn.make, args=(5,))

    assert rref.confirmed_by_owner()


# ---------------------------------------------------------------------- values and errors


@on_worker(0)
def test_to_here_waits_until_the_value_is_made():
    rref = rpc.remote("w1", fn.wait_and_make, args=("made", 5))
    rpc.rpc_sync("w1", functions.wait_until_blocked, args=("made",))
    rpc.rpc_async("w1", functions.set_event, args=("made",))

    assert rref.to_here() == 5


@on_worker(0)
def test_local_value_waits_until_the_value_is_made():
    rref = rpc.remote("w0", fn.wait_and_make, args=("made", 5))
    functions.wait_until_blocked("made")
    rpc.rpc_async("w1", rpc.rpc_sync, args=("w0", functions.set_event, ("made",)))

    assert rref.local_value() == 5


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_error_of_the_function_arrives_with_its_type(to):
    rref: rpc.RRef[Any] = rpc.remote(to, fn.raise_my_error, args=("text",))

    for _ in range(2):
        error = catch(MyError, rref.to_here)
        assert isinstance(error, RemoteError)
        assert error.worker == to
        assert "raise_my_error" in error.remote_traceback
        assert str(error).startswith("text")


@on_worker(0)
def test_error_of_the_function_arrives_at_third_workers():
    rref: rpc.RRef[Any] = rpc.remote("w1", fn.raise_my_error)

    catch(MyError, rpc.rpc_sync, "w2", fn.fetch, args=(rref,))
    catch(MyError, rpc.rpc_sync, "w1", fn.local, args=(rref,))


@on_worker(0)
def test_error_of_the_function_arrives_at_proxies():
    rref: rpc.RRef[Any] = rpc.remote("w1", fn.raise_my_error)

    catch(MyError, lambda: rref.rpc_sync().get())
    catch(MyError, lambda: rref.rpc_async().get().wait())
    catch(MyError, lambda: rref.remote().get().to_here())


@on_worker(0)
def test_function_that_is_not_there_is_an_error_of_the_value():
    rref = rpc.remote("w1", functions.echo, args=(fn.Undecodable(),))

    error = catch(GradwireError, rref.to_here)
    assert "this cannot be read" in str(error)


@on_worker(0)
def test_value_that_cannot_be_sent_can_be_referred_to():
    rref = rpc.remote("w1", fn.return_unsendable)

    catch(EncodeError, rref.to_here)
    assert rref.rpc_sync().locked() is False


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_coroutines_and_asynchronous_functions_make_values(to):
    for rref in (
        rpc.remote(to, fn.add_slowly, args=(1, 2)),
        rpc.remote(to, fn.add_elsewhere, args=("w2", 1, 2)),
    ):
        assert [rref.to_here() for _ in range(2)] == [3, 3]
        assert rpc.rpc_sync("w2", fn.fetch, args=(rref,)) == 3
    catch(MyError, rpc.remote(to, fn.raise_slowly).to_here)
    catch(MyError, rpc.remote(to, fn.raise_elsewhere, args=("w2",)).to_here)
    error = catch(UsageError, rpc.remote(to, fn.no_future).to_here)
    assert "no_future" in str(error)


@on_worker(0)
def test_reference_to_a_reference():
    rref = rpc.remote("w1", fn.make_remote, args=("w2", functions.echo, 5))

    inner = rref.to_here()

    assert inner.owner_name() == "w2"
    assert inner.to_here() == 5


# ------------------------------------------------------------------------------- proxies


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_proxies_call_methods_where_the_value_lives(to):
    rref = rpc.remote(to, Counter, args=(10,))

    assert rref.rpc_sync().add(5) == 15
    assert rref.rpc_async().add(amount=5).wait() == 20
    assert rref.remote().add().to_here() == 21
    assert rref.rpc_sync().where() == to


@on_worker(0)
def test_proxies_pass_all_arguments():
    rref = rpc.remote("w1", Counter)

    assert rref.rpc_sync().all_of(1, x=2) == ((1,), {"x": 2})
    assert rref.rpc_sync().all_of(name=1, self_=2) == ((), {"name": 1, "self_": 2})
    plain = (1, -2.5, True, None, "text", b"bytes")
    assert rref.rpc_sync().all_of(*plain) == (plain, {})
    too_large = (2**70, "\udc80")  # for what plain values are sent with
    assert rref.rpc_sync().all_of(*too_large) == (too_large, {})
    assert rref.rpc_async().all_of(*too_large).wait() == (too_large, {})


@on_worker(0)
def test_proxies_pass_references():
    rref = rpc.remote("w1", Counter)
    other = rpc.remote("w2", Counter, args=(3,))

    (back, own), _ = rref.rpc_sync().all_of(other, RRef(4))

    assert back.to_here().value == 3
    assert own.local_value() == 4


@on_worker(0)
def test_proxies_give_attributes():
    rref = rpc.remote("w1", Counter, args=(10,))

    assert rref.rpc_sync().value() == 10
    assert rref.rpc_async().label().wait() == "counter"
    assert rref.remote().value().to_here() == 10
    assert rref.rpc_sync().none() is None


@on_worker(0)
def test_proxies_reach_methods_of_classes():
    rref = rpc.remote("w1", Counter)

    assert rref.rpc_sync().of_class() == "Counter"
    assert rref.rpc_sync().of_nobody(1) == 2
    assert rref.rpc_sync().__len__ is not None  # an attribute is not looked up here


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_proxies_wait_for_asynchronous_methods(to):
    rref = rpc.remote(to, Counter, args=(1,))

    assert rref.rpc_sync().add_elsewhere("w2", 2) == 30
    assert rref.rpc_async().add_elsewhere("w2", 2).wait() == 30
    assert rref.remote().add_elsewhere("w2", 2).to_here() == 30
    assert rref.rpc_sync().add_slowly(1) == 2
    assert rref.rpc_async().add_slowly(1).wait() == 3
    assert rref.remote().add_slowly(1).to_here() == 4


@on_worker(0)
def test_proxies_raise_what_the_method_raised():
    rref = rpc.remote("w1", Counter)

    catch(KeyError, lambda: rref.rpc_sync().fail("text"))
    catch(KeyError, rref.rpc_async().fail("text").wait)
    catch(KeyError, rref.remote().fail("text").to_here)
    catch(LookupError, lambda: rref.rpc_sync().fail_slowly())
    catch(LookupError, rref.remote().fail_slowly().to_here)
    catch(UsageError, lambda: rref.rpc_sync().add_nowhere())


@on_worker(0)
def test_proxies_say_which_attribute_is_missing():
    rref = rpc.remote("w1", Counter)

    for call in (
        lambda: rref.rpc_sync().missing(),
        lambda: rref.rpc_async().missing().wait(),
        lambda: rref.remote().missing().to_here(),
    ):
        assert "missing" in str(catch(AttributeError, call))


@on_worker(0)
def test_result_of_a_proxy_is_the_value_itself_on_the_owner():
    rref = rpc.remote("w1", Counter, args=(1,))

    same = rref.remote().itself()
    same.rpc_sync().add(1)

    assert rref.rpc_sync().get() == 2


@on_worker(0)
def test_proxy_waits_until_the_value_is_made():
    rref = rpc.remote("w1", fn.wait_and_make, args=("made", [3]))
    found = rref.rpc_async().__getitem__(0)
    rpc.rpc_sync("w1", functions.set_event, args=("made",))

    assert found.wait() == 3


@on_worker(0)
def test_temporary_references_live_until_their_call_is_done():
    for _ in range(20):
        assert rpc.remote("w1", Counter, args=(1,)).rpc_sync().get() == 1
        assert rpc.remote("w1", Counter, args=(1,)).rpc_async().get().wait() == 1
        assert rpc.remote("w1", Counter, args=(1,)).remote().get().to_here() == 1
        assert rpc.remote("w1", Counter, args=(1,)).to_here().value == 1


@on_worker(0)
def test_chain_of_values_does_not_keep_the_earlier_ones():
    rref = rpc.remote("w1", Counter)
    for _ in range(10):
        rref = rref.remote().itself()
    rref.to_here()

    fn.wait_until(lambda: fn.counts() == {"user_rrefs": 1})
    fn.wait_until(lambda: rpc.rpc_sync("w1", fn.count_of, ("owner_rrefs",)) == 1)


@on_worker(0)
def test_future_that_is_kept_does_not_keep_its_reference():
    future = rpc.remote("w1", Counter).rpc_async().get()
    future.wait()

    fn.wait_until(lambda: fn.counts() == {})
    del future


# ----------------------------------------------------------------------------- travelling


@pytest.mark.parametrize("owner", ALL)
@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_reference_as_an_argument(owner, to):
    rref = rpc.remote(owner, functions.echo, args=(5,))

    assert rpc.rpc_sync(to, fn.fetch, args=(rref,)) == 5
    assert rpc.rpc_async(to, fn.fetch, kwargs={"rref": rref}).wait() == 5
    assert rpc.remote(to, fn.fetch, args=(rref,)).to_here() == 5
    assert rpc.rpc_sync(to, fn.describe, args=(rref,)) == (owner == to, owner, True)


@pytest.mark.parametrize("owner", ALL)
@pytest.mark.parametrize("via", ["w0", "w1"])
@on_worker(0)
def test_reference_as_a_result(owner, via):
    rref = rpc.rpc_sync(via, fn.make_remote, args=(owner, functions.echo, 5))

    assert rref.owner_name() == owner
    assert rref.is_owner() == (owner == "w0")
    assert rref.to_here() == 5


@pytest.mark.parametrize(
    "ways",
    [
        ("w1",),  # back to the owner
        ("w0",),  # to oneself
        ("w2", "w1"),
        ("w2", "w2", "w2"),
        ("w2", "w0", "w3", "w1"),
        ("w2", "w3", "w2", "w3"),
        ("w1", "w1", "w0", "w0"),
    ],
)
@on_worker(0)
def test_reference_goes_from_worker_to_worker(ways):
    rref = rpc.remote("w1", functions.echo, args=(5,))

    assert rpc.rpc_sync(ways[0], fn.pass_around, args=(rref, *ways[1:])) == 5


@pytest.mark.parametrize("ways", [("w1",), ("w0",), ("w1", "w2"), ("w1", "w0", "w1")])
@on_worker(0)
def test_own_reference_goes_from_worker_to_worker(ways):
    rref = RRef(5)

    assert rpc.rpc_sync(ways[0], fn.pass_around, args=(rref, *ways[1:])) == 5


@on_worker(0)
def test_references_inside_containers():
    a, b = RRef(1), rpc.remote("w2", functions.echo, args=(2,))
    value = {"list": [a, b], "tuple": (a, {"deep": b}), "object": CounterWithRef(b)}

    back = rpc.rpc_sync("w1", functions.echo, args=(value,))

    assert [r.to_here() for r in back["list"]] == [1, 2]
    assert back["tuple"][1]["deep"].to_here() == 2
    assert back["object"].rref.to_here() == 2
    assert rpc.rpc_sync("w1", fn.fetch_all, args=([a, b, a],)) == [1, 2, 1]


class CounterWithRef:
    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref


@on_worker(0)
def test_worker_that_keeps_a_reference_keeps_the_value():
    rref = rpc.remote("w1", functions.echo, args=(5,))
    rpc.rpc_sync("w2", fn.keep, args=("rref", rref))
    del rref
    gc.collect()
    fn.wait_until(lambda: fn.counts() == {})

    assert rpc.rpc_sync("w3", fn.fetch_from, args=("w2", "rref")) == 5


@on_worker(0)
def test_value_lives_on_its_owner_after_the_last_reference():
    rpc.rpc_sync("w1", fn.keep_own, args=("rref", [1]))
    fn.wait_until(lambda: rpc.rpc_sync("w1", fn.count_of, ("owner_rrefs",)) == 0)

    assert rpc.rpc_sync("w1", fn.give, args=("rref",)).to_here() == [1]


@on_worker(0)
def test_value_dies_with_the_last_reference():
    value = Counter()
    seen = weakref.ref(value)
    rref = RRef(value)
    rpc.rpc_sync("w1", fn.keep, args=("rref", rref))
    del value, rref
    assert seen() is not None

    rpc.rpc_sync("w1", fn.take, args=("rref",))

    fn.wait_until(lambda: seen() is None)


@on_worker(0)
def test_reference_that_is_sent_before_its_value_is_made():
    rref = rpc.remote("w1", fn.wait_and_make, args=("made", 5))
    fetched = rpc.rpc_async("w2", fn.fetch, args=(rref,))
    at_home = rpc.rpc_async("w1", fn.local, args=(rref,))
    rpc.rpc_sync("w2", fn.keep, args=("rref", rref))
    del rref
    rpc.rpc_sync("w1", functions.set_event, args=("made",))

    assert fetched.wait() == at_home.wait() == 5
    assert rpc.rpc_sync("w2", fn.fetch_from, args=("w2", "rref")) == 5


@on_worker(0)
def test_calls_that_overtake_the_creation_wait_for_the_value():
    for number in range(30):
        rref = rpc.remote("w1", fn.wait_a_bit, args=(number,))
        at_home = rpc.rpc_async("w1", fn.local, args=(rref,))
        assert rpc.rpc_sync("w2", fn.fetch, args=(rref,)) == number
        assert at_home.wait() == number


# --------------------------------------------------------------------------- confirmation


def start_call_with_reference_to_a_frozen_owner(cluster: Cluster) -> Any:
    """w0 calls w2 with a reference to a value of w1, which cannot answer."""
    for rank in (0, 2):
        cluster.run(rank, rpc.rpc_sync, "w1", functions.get_pid)
    cluster.run(0, rpc.rpc_sync, "w2", functions.get_pid)
    cluster.run(0, keep_remote, "rref", "w1")
    cluster.stop(1)
    return cluster.start(0, call_with_kept, "w2", fn.note_start, "begun")


def keep_remote(name: str, owner: str) -> None:
    fn.keep(name, rpc.remote(owner, Counter))
    fn.kept[name].to_here()


def call_with_kept(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=(*args, fn.kept["rref"]))


@pytest.mark.chaos
def test_function_does_not_run_before_its_references_are_confirmed(make_cluster):
    cluster = make_cluster(4, {"lost_after": 5.0})
    cluster.run(3, rpc.rpc_sync, "w2", functions.get_pid)
    call = start_call_with_reference_to_a_frozen_owner(cluster)
    # The call has arrived there: the reference waits for its confirmation.
    cluster.run(2, fn.wait_until, has_pending_user)
    # Anything that is called now runs: nothing but the confirmation holds the call up.
    assert cluster.run(3, rpc.rpc_sync, "w2", functions.get_pid) == cluster.pid(2)
    assert not cluster.run(2, fn.has_begun, "begun")

    cluster.cont(1)

    call.result()
    assert cluster.run(2, fn.has_begun, "begun")
    fn.check_nothing_is_left(cluster)


def has_pending_user() -> bool:
    return fn.count_of("pending_users") == 1


def leave_at_once() -> list[str]:
    """Shuts this worker down; returns its threads that are left."""
    rpc.shutdown(graceful=False)
    return [t.name for t in threading.enumerate() if t.name.startswith("gradwire-w")]


@pytest.mark.chaos
def test_handler_that_waits_for_a_confirmation_ends_with_its_worker(make_cluster):
    cluster = make_cluster(4, {"lost_after": 30.0})
    call = start_call_with_reference_to_a_frozen_owner(cluster)
    cluster.run(2, fn.wait_until, has_pending_user)

    left = cluster.run(2, leave_at_once)

    cluster.cont(1)
    assert left == []
    with pytest.raises(PeerLostError, match="'w2'"):
        call.result()


# ------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_to_here_has_a_limit(to):
    rref = rpc.remote(to, fn.wait_and_make, args=("made", 5))

    catch(CallTimeout, rref.to_here, timeout=0.02)
    catch(CallTimeout, lambda: rref.to_here(0.02))

    rpc.rpc_sync(to, functions.set_event, args=("made",))
    assert rref.to_here(timeout=10) == 5


@on_worker(0)
def test_timeouts_say_what_the_program_has_called():
    rref = rpc.remote("w1", fn.wait_and_make, args=("made", Counter()))
    own = rpc.remote("w0", fn.wait_and_make, args=("made", Counter()))

    with pytest.raises(CallTimeout, match=r"the call of to_here\(\) on worker 'w1'"):
        rref.to_here(timeout=0.02)
    for each, worker in ((rref, "w1"), (own, "w0")):
        with pytest.raises(CallTimeout, match=f"the method 'get' on worker '{worker}'"):
            each.rpc_sync(timeout=0.02).get()
    rpc.rpc_sync("w1", functions.set_event, args=("made",))
    functions.set_event("made")


@on_worker(0)
def test_proxies_have_a_limit():
    rref = rpc.remote("w1", fn.wait_and_make, args=("made", Counter()))

    catch(CallTimeout, lambda: rref.rpc_sync(timeout=0.02).get())
    catch(CallTimeout, lambda: rref.rpc_async(timeout=0.02).get().wait())
    found = rref.remote(timeout=0.02).get()
    catch(CallTimeout, found._get_future().wait)
    catch(CallTimeout, found.to_here)

    rpc.rpc_sync("w1", functions.set_event, args=("made",))
    assert rref.rpc_sync(timeout=10).get() == 0


@on_worker(0)
def test_remote_has_a_limit():
    rref = rpc.remote("w1", fn.wait_and_make, args=("made", 5), timeout=0.02)

    catch(CallTimeout, rref._get_future().wait)
    assert not rref.confirmed_by_owner()
    catch(CallTimeout, rref.to_here)
    catch(CallTimeout, lambda: rref.rpc_sync().get())
    catch(CallTimeout, lambda: rref.remote().get())
    catch(CallTimeout, rpc.rpc_sync, "w2", fn.fetch, args=(rref,))

    rpc.rpc_sync("w1", functions.set_event, args=("made",))


@on_worker(0)
def test_remote_to_oneself_has_a_limit():
    rref = rpc.remote("w0", fn.wait_and_make, args=("made", 5), timeout=0.02)

    catch(CallTimeout, rref.to_here)
    functions.set_event("made")


@on_worker(0)
def test_references_to_what_was_given_up_end_too():
    rref = rpc.remote("w1", fn.wait_and_make, args=("made", 5), timeout=0.1)
    rpc.rpc_sync("w2", fn.keep, args=("rref", rref))
    catch(CallTimeout, rref._get_future().wait)
    rpc.rpc_sync("w1", functions.set_event, args=("made",))

    # It was entered before the limit, so the value is there.
    assert rpc.rpc_sync("w2", fn.fetch_from, args=("w2", "rref")) == 5


@pytest.mark.parametrize("timeout", [-2, float("nan"), "soon"])
@on_worker(0)
def test_bad_limits_are_refused(timeout):
    rref = rpc.remote("w1", Counter)

    catch((TypeError, ValueError), rref.to_here, timeout=timeout)
    catch((TypeError, ValueError), lambda: rref.rpc_sync(timeout=timeout).get())
    catch((TypeError, ValueError), rpc.remote, "w1", Counter, timeout=timeout)


@pytest.mark.chaos
def test_call_whose_deadline_has_passed_leaves_nothing(make_cluster):
    cluster = make_cluster(3, {"lost_after": 5.0})
    cluster.run(0, rpc.rpc_sync, "w1", functions.get_pid)
    cluster.run(0, rpc.rpc_sync, "w2", functions.get_pid)
    cluster.run(2, rpc.rpc_sync, "w1", functions.get_pid)
    cluster.run(0, keep_remote, "rref", "w2")
    cluster.stop(1)
    cluster.run(0, call_too_late)
    cluster.cont(1)

    assert not cluster.run(1, fn.has_begun, "begun")
    fn.check_nothing_is_left(cluster)
    assert not cluster.run(1, fn.has_begun, "begun")


def call_too_late() -> None:
    """Calls with references that the callee will read when nobody waits any more."""
    references = (RRef(1), fn.kept["rref"])
    arguments = ("begun", *references)
    catch(CallTimeout, rpc.rpc_sync, "w1", fn.note_start, arguments, timeout=0.02)
    rref = rpc.remote("w1", fn.note_start, arguments, timeout=0.02)
    catch(CallTimeout, rref._get_future().wait)
    catch(CallTimeout, rref.to_here)


# ------------------------------------------------------------------- messages that break


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_argument_that_cannot_be_sent_takes_references_back(to):
    rref = rpc.remote("w2", Counter)
    arguments = (RRef(1), rref, threading.Lock(), rref)

    catch(EncodeError, rpc.rpc_sync, to, fn.fetch_all, args=(arguments,))
    catch(EncodeError, rpc.rpc_async, to, fn.fetch_all, args=(arguments,))
    catch(EncodeError, rpc.remote, to, fn.fetch_all, args=(arguments,))
    catch(EncodeError, lambda: rref.rpc_sync().all_of(*arguments))

    assert rref.to_here().value == 0


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_argument_that_cannot_be_read_takes_references_back(to):
    rref = rpc.remote("w2", Counter)
    arguments = [RRef(1), rref, fn.Undecodable(), rref, RRef(2)]

    catch(DecodeError, rpc.rpc_sync, to, fn.fetch_all, args=(arguments,))
    catch(DecodeError, rpc.remote(to, fn.fetch_all, args=(arguments,)).to_here)

    assert rref.to_here().value == 0


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_result_that_cannot_be_sent_takes_references_back(to):
    catch(EncodeError, rpc.rpc_sync, to, fn.return_with_unsendable)
    made = rpc.remote("w1", fn.return_with_unsendable)
    catch(EncodeError, made.to_here)


@pytest.mark.parametrize("to", ["w0", "w1"])
@on_worker(0)
def test_result_that_cannot_be_read_takes_references_back(to):
    catch(DecodeError, rpc.rpc_sync, to, fn.return_with_undecodable)
    made = rpc.remote("w1", fn.return_with_undecodable)
    catch(DecodeError, made.to_here)


@on_worker(0)
def test_function_that_raises_leaves_nothing_of_its_arguments():
    rref = rpc.remote("w2", Counter)

    catch(TypeError, rpc.rpc_sync, "w1", fn.raise_my_error, args=(rref, rref))
    catch(AttributeError, rpc.rpc_sync, "w1", fn.fetch_all, args=([rref, 5],))
    catch(AttributeError, rpc.remote("w1", fn.fetch_all, args=([rref, 5],)).to_here)


@on_worker(0)
def test_result_that_comes_too_late_leaves_nothing():
    future = rpc.rpc_async("w1", fn.wait_and_refer, args=("made", 5), timeout=0.02)
    rpc.rpc_sync("w1", functions.wait_until_blocked, args=("made",))
    catch(CallTimeout, future.wait)

    rpc.rpc_sync("w1", functions.set_event, args=("made",))


@on_worker(0)
def test_forwarded_result_that_comes_too_late_leaves_nothing():
    rpc.rpc_sync("w1", keep_remote, args=("key", "w2"))
    future = rpc.rpc_async("w1", fn.wait_and_give, args=("go", "key"), timeout=0.02)
    rpc.rpc_sync("w1", functions.wait_until_blocked, args=("go",))
    catch(CallTimeout, future.wait)

    rpc.rpc_sync("w1", functions.set_event, args=("go",))


@on_worker(0)
def test_reference_inside_an_error_is_no_reference():
    rref = RRef(1)

    error = catch(Exception, rpc.rpc_sync, "w1", raise_with_reference, args=(rref,))
    assert isinstance(error, RemoteError)


def raise_with_reference(rref: RRef[Any]) -> None:
    raise ValueError("it holds a reference", rref)


# ------------------------------------------------------------------------ outside of calls


@on_worker(0)
def test_references_cannot_be_pickled_or_copied():
    for rref in (RRef(torch.ones(2)), rpc.remote("w1", Counter)):
        for attempt in (
            lambda: pickle.dumps(rref),  # noqa: B023
            lambda: pickle.dumps([{"deep": rref}]),  # noqa: B023
            lambda: copy.copy(rref),  # noqa: B023
            lambda: copy.deepcopy([rref]),  # noqa: B023
            lambda: torch.save(rref, io.BytesIO()),  # noqa: B023
        ):
            error = catch(RuntimeError, attempt)
            assert "Can not pickle rref in python pickler" in str(error)
            assert "to_here()" in str(error)


@on_worker(0)
def test_remote_refuses_what_cannot_be_called():
    catch(TypeError, rpc.remote, "w1", 5)
    catch(GradwireError, rpc.remote, "nobody", Counter)


# ---------------------------------------------------------------------------------- losses


LOSSES = pytest.mark.chaos


def make(make_cluster: Callable[..., Cluster], size: int = 3) -> Cluster:
    return make_cluster(size, {"lost_after": 2.0})


def has_lost_one() -> bool:
    return fn.count_of("workers_lost") == 1


def kill(cluster: Cluster, rank: int, *witnesses: int) -> None:
    cluster.kill(rank)
    for witness in witnesses:
        cluster.run(witness, fn.wait_until, has_lost_one)


@LOSSES
def test_lost_owner_is_an_error_everywhere(make_cluster):
    cluster = make(make_cluster)
    cluster.run(0, keep_remote, "rref", "w1")
    cluster.run(0, call_with_kept, "w2", fn.keep, "rref")
    kill(cluster, 1, 0, 2)

    cluster.run(0, check_owner_is_lost, "rref")
    cluster.run(2, check_owner_is_lost, "rref")
    fn.check_nothing_is_left(cluster, 1)


def check_owner_is_lost(name: str) -> None:
    rref = fn.kept[name]
    other = "w2" if rpc.get_worker_info().name == "w0" else "w0"
    for attempt in (
        rref.to_here,
        lambda: rref.rpc_sync().get(),
        lambda: rref.rpc_async().get().wait(),
        lambda: rref.remote().get(),
        rref.backward,
        lambda: rpc.rpc_sync(other, fn.keep, args=("rref", rref)),
        lambda: rpc.remote(other, fn.keep, args=("rref", rref)),
    ):
        error = catch(OwnerLost, attempt)
        assert error.worker == "w1"
        assert "'w1'" in str(error)
    assert rref.owner_name() == "w1"
    assert not rref.confirmed_by_owner()
    assert not rref.is_owner()


@on_worker(0)
def test_reference_to_what_its_owner_had_before_a_restart_is_lost():
    rref = rpc.remote("w1", Counter)
    rref.to_here()
    assert isinstance(rref._ref, User)
    rref._ref.life -= 1  # as if it came from somebody who has not noticed the restart

    error = catch(OwnerLost, rpc.rpc_sync, "w2", fn.fetch, args=(rref,))
    assert "'w1'" in str(error)
    assert "restarted" in str(error)
    catch(OwnerLost, rpc.rpc_sync, "w1", fn.fetch, args=(rref,))
    del rref


@on_worker(0)
def test_reference_that_is_sent_while_its_owner_is_being_lost():
    rref = rpc.remote("w1", Counter)
    rref.to_here()
    service, user = rref._service, rref._ref
    assert isinstance(user, User)
    del service._users[user.fork]  # and the reference itself will be told in a moment
    try:
        error = catch(OwnerLost, rpc.rpc_sync, "w2", fn.fetch, args=(rref,))
    finally:
        service._users[user.fork] = user

    assert error.worker == "w1"


@LOSSES
def test_owner_that_cannot_be_reached_is_not_dialled_for_each_reference(make_cluster):
    cluster = make(make_cluster)
    cluster.run(0, rpc.rpc_sync, "w2", functions.get_pid)
    cluster.run(2, count_dials)
    cluster.stop(2)
    cluster.run(0, send_references, "w1", "w2", 50)
    cluster.kill(1)
    cluster.cont(2)

    cluster.run(0, check_call_has_lost_the_owner)
    assert cluster.run(2, whom_it_dialled) == ["w1"]
    fn.check_nothing_is_left(cluster, 1)


dialled: list[str] = []


def count_dials() -> None:
    """Takes down whom this worker dials from now on."""
    dialer: Any = current_agent().network._dialer
    dial = dialer.dial

    def count(record: Any, limit: float) -> Any:
        dialled.append(record.name)
        return dial(record, limit)

    dialer.dial = count


def send_references(owner: str, to: str, count: int) -> None:
    rrefs = [rpc.remote(owner, Counter) for _ in range(count)]
    for rref in rrefs:
        rref.to_here()
    fn.keep("call", rpc.rpc_async(to, fn.fetch_all, args=(rrefs,)))


def check_call_has_lost_the_owner() -> None:
    error = catch(OwnerLost, fn.kept.pop("call").wait)
    assert "'w1'" in str(error)


def whom_it_dialled() -> list[str]:
    return dialled


@LOSSES
def test_owner_that_dies_while_it_is_waited_for(make_cluster):
    cluster = make(make_cluster)
    waits = cluster.start(0, wait_in_vain)
    cluster.run(1, functions.wait_until_blocked, "never")
    cluster.kill(1)

    assert waits.result() == ["OwnerLost"] * 4
    fn.check_nothing_is_left(cluster, 1)


def wait_in_vain() -> list[str]:
    """The errors of all ways to wait for a value that is never made."""
    rref = rpc.remote("w1", functions.block_until_set, args=("never",))
    found: list[str] = []

    def wait(attempt: Callable[[], Any]) -> None:
        found.append(type(catch(PeerLostError, attempt)).__name__)

    threads = [
        threading.Thread(target=wait, args=(attempt,))
        for attempt in (
            rref.to_here,
            lambda: rref.rpc_sync().get(),
            lambda: rpc.rpc_sync("w2", fn.fetch, args=(rref,)),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait(rref.to_here)
    return found


@LOSSES
def test_references_of_a_lost_worker_are_dropped(make_cluster):
    cluster = make(make_cluster)
    cluster.run(0, keep_own, "own", [1])
    for rank in (1, 2):
        cluster.run(rank, take_from_0, "own")
        cluster.run(rank, make_at_0, f"made by w{rank}")
    assert cluster.run(0, fn.counts) == {"owner_rrefs": 3, "forks": 4}

    kill(cluster, 1, 0)

    cluster.run(0, fn.wait_until, has_two_forks)
    assert cluster.run(2, fetch_kept, "own") == [1]
    assert cluster.run(2, fetch_kept, "made by w2") == "made by w2"
    fn.check_nothing_is_left(cluster, 1)


def keep_own(name: str, value: Any) -> None:
    fn.keep(name, RRef(value))


def take_from_0(name: str) -> None:
    fn.keep(name, rpc.rpc_sync("w0", fn.give, args=(name,)))


def make_at_0(name: str) -> None:
    fn.keep(name, rpc.remote("w0", functions.echo, args=(name,)))
    fn.kept[name].to_here()


def fetch_kept(name: str) -> Any:
    return fn.kept[name].to_here()


def has_two_forks() -> bool:
    return fn.counts() == {"owner_rrefs": 2, "forks": 2}


@LOSSES
def test_result_for_a_lost_caller_leaves_nothing(make_cluster):
    cluster = make(make_cluster)
    cluster.run(0, keep_remote, "key", "w2")
    cluster.start(1, rpc.rpc_sync, "w0", fn.wait_and_refer, ("one", 5))
    cluster.run(0, functions.wait_until_blocked, "one")
    cluster.start(1, rpc.rpc_sync, "w0", fn.wait_and_give, ("one", "key"))
    kill(cluster, 1, 0)

    cluster.run(0, functions.set_event, "one")

    fn.check_nothing_is_left(cluster, 1)


@LOSSES
def test_argument_for_a_worker_that_dies_meanwhile_leaves_nothing(make_cluster):
    cluster = make(make_cluster)
    cluster.run(0, keep_remote, "rref", "w2")
    cluster.run(0, send_while_it_dies, cluster.pid(1))
    cluster.wait_dead(1)

    fn.check_nothing_is_left(cluster, 1)


def send_while_it_dies(pid: int) -> None:
    def die() -> None:
        os.kill(pid, signal.SIGKILL)
        fn.wait_until(has_lost_one)

    rpc.rpc_sync("w1", functions.get_pid)
    arguments = (fn.Hooked(die), RRef(5), fn.kept["rref"])
    catch(PeerLostError, rpc.rpc_sync, "w1", fn.fetch_all, args=(arguments,))
    catch(PeerLostError, rpc.remote, "w1", fn.fetch_all, args=(arguments,))


@LOSSES
def test_creator_that_dies_leaves_nothing(make_cluster):
    cluster = make(make_cluster)
    cluster.start(1, rpc.remote, "w0", fn.wait_and_make, ("made", 5))
    cluster.run(0, functions.wait_until_blocked, "made")
    kill(cluster, 1, 0)
    cluster.run(0, functions.set_event, "made")

    fn.check_nothing_is_left(cluster, 1)


@LOSSES
def test_parent_that_dies_leaves_the_reference_that_it_gave(make_cluster):
    cluster = make(make_cluster)
    cluster.run(0, keep_own, "own", [1])
    cluster.run(1, take_from_0, "own")
    cluster.run(1, give_kept, "own", "w2")
    kill(cluster, 1, 0, 2)

    assert cluster.run(2, fetch_kept, "own") == [1]
    fn.check_nothing_is_left(cluster, 1)


def give_kept(name: str, to: str) -> None:
    rpc.rpc_sync(to, fn.keep, args=(name, fn.kept[name]))


# ------------------------------------------------------------------------------- shutdown


def test_worker_leaves_with_references_in_its_hands(make_cluster):
    cluster = make_cluster(2)
    for rank in (0, 1):
        cluster.run(rank, keep_remote, "rref", f"w{1 - rank}")
        cluster.run(rank, keep_remote, "own", f"w{rank}")
    start = time.monotonic()

    cluster.close(graceful=True)

    assert time.monotonic() - start < 5


def test_references_work_again_after_a_second_init(make_cluster, tmp_path):
    cluster = make_cluster(1)

    cluster.run(0, use_twice, str(tmp_path))


def use_twice(folder: str) -> None:
    old = RRef(1)
    rref = rpc.remote("w0", Counter)
    rpc.shutdown()
    assert old.local_value() == 1
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/again")
    rpc.init_rpc("w0", 0, 1, options)

    error = catch(UsageError, rpc.rpc_sync, "w0", fn.fetch, args=(old,))
    assert "shutdown" in str(error)
    assert rpc.rpc_sync("w0", fn.fetch, args=(RRef(2),)) == 2
    del old, rref
    fn.wait_until_nothing_is_left()


# -------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("seed", [1, 2])
def test_many_threads_create_send_and_drop(cluster, seed):
    runs = [cluster.start(rank, work_in_threads, seed, rank) for rank in range(4)]

    for run in runs:
        run.result()


def work_in_threads(seed: int, rank: int) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            use_references(random.Random(f"{seed} {rank} {number}"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads overtake each other wherever they can
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def use_references(chance: random.Random) -> None:
    held: list[tuple[RRef[Any], int]] = []
    for number in range(30):
        to = chance.choice(ALL)
        if len(held) < 2 or chance.random() < 0.3:
            if chance.random() < 0.7:
                held.append((rpc.remote(to, functions.echo, args=(number,)), number))
            else:
                held.append((RRef(number), number))
        rref, value = chance.choice(held)
        what = chance.randrange(6)
        if what == 0:
            ways = chance.choices(ALL, k=2)
            assert rpc.rpc_sync(to, fn.pass_around, args=(rref, *ways)) == value
        elif what == 1:
            held.append((rpc.rpc_sync(to, functions.echo, args=(rref,)), value))
        elif what == 2:
            held.append((rpc.remote(to, fn.fetch, args=(rref,)), value))
        elif what == 3:
            assert rref.to_here() == value
        elif what == 4:
            made = rpc.remote(to, fn.wait_a_bit, args=(number,))
            at_home = rpc.rpc_async(to, fn.local, args=(made,))
            assert rpc.rpc_sync(chance.choice(ALL), fn.fetch, args=(made,)) == number
            del made
            assert at_home.wait() == number
        else:
            held.pop(chance.randrange(len(held)))
        while len(held) > 5:
            held.pop(chance.randrange(len(held)))


def ask_for_what_never_comes(function_name: str, incarnation: int) -> None:
    """Asks w0 for a value that w1 was to have made there."""
    from gradwire.rpc import _rref

    args: tuple[object, ...] = (1, incarnation, 999_999)
    if function_name == "invoke":
        args += ("size",)
    rpc.rpc_async("w0", getattr(_rref, function_name), args, timeout=0)


def own_incarnation() -> int:
    from gradwire.rpc.extension import current_agent

    return current_agent().network.incarnation


def num_served_now() -> int:
    return int(rpc.get_debug_info()["server_active_calls"])


@pytest.mark.parametrize("function_name", ["fetch", "invoke"])
def test_who_asks_for_what_never_comes_and_dies_leaves_nothing(
    make_cluster, function_name
):
    cluster = make_cluster(3)
    incarnation = cluster.run(1, own_incarnation)
    cluster.run(2, ask_for_what_never_comes, function_name, incarnation)
    probes.wait_until(
        lambda: cluster.run(0, num_served_now) == 1, "w0 waits for the value"
    )

    cluster.kill(2)

    probes.wait_until(
        lambda: cluster.run(0, num_served_now) == 0, "w0 waits no more", 5.0
    )


# ------------------------------------------------------------------ late, and in between


class Late:
    """Comes later than its sender waits, and is rebuilt when it is told to."""

    def __reduce__(self) -> Any:
        return functions.block_until_set, ("rebuilt late",)


@on_worker(0)
def test_call_that_comes_after_the_end_of_its_reference_fails_and_waits_for_nothing():
    rref = rpc.remote("w1", Counter)
    rref.to_here()
    with pytest.raises(CallTimeout):
        rref.rpc_sync(timeout=0.2).add(Late())
    rpc.rpc_sync("w1", functions.wait_until_blocked, ("rebuilt late",))
    del rref
    gc.collect()
    probes.wait_until(
        lambda: rpc.rpc_sync("w1", rpc.get_debug_info)["owner_rrefs"] == 0,
        "the value is gone",
    )

    rpc.rpc_sync("w1", functions.set_event, ("rebuilt late",))

    probes.wait_until(
        lambda: rpc.rpc_sync("w1", rpc.get_debug_info)["server_active_calls"] == 1,
        "the call has ended, all but the one that asks",
    )
    assert rpc.rpc_sync("w1", rpc.get_debug_info)["awaited_values"] == 0


class SendsAtItsEnd:
    """Its finaliser sends a reference, which it may, wherever the collector finds it."""

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref
        self.itself = self

    def __del__(self) -> None:
        _sent_at_the_end.append(
            rpc.rpc_async("w1", functions.echo, (self.rref,), timeout=10.0)
        )


_sent_at_the_end: list[Any] = []


def give_reference() -> RRef[Any]:
    return RRef([1])


@on_worker(0)
def test_finaliser_may_send_a_reference_while_another_one_is_entered():
    rref = RRef([1])
    rpc.rpc_sync("w1", functions.echo, (rref,))  # they are connected from now on
    before = gc.get_threshold()
    # So that one runs where an object is made, sooner or later.
    gc.set_threshold(50, 10, 10)
    try:
        for _ in range(NUM_FINALISERS):
            SendsAtItsEnd(rref)
            rpc.rpc_sync("w1", give_reference, timeout=10.0)
    finally:
        gc.set_threshold(*before)
    gc.collect()

    assert len(_sent_at_the_end) == NUM_FINALISERS
    while _sent_at_the_end:
        assert isinstance(_sent_at_the_end.pop().wait(), RRef)


@on_worker(0)
def test_fetch_of_what_was_made_too_late_fails_each_time():
    rref = rpc.remote("w1", functions.block_until_set, ("made late",), timeout=0.2)
    rpc.rpc_sync("w1", functions.wait_until_blocked, ("made late",))
    fetching = threading.Timer(
        0.5, rpc.rpc_sync, ("w1", functions.set_event, ("made late",))
    )
    fetching.start()

    for _ in range(2):
        with pytest.raises(CallTimeout):
            rref.to_here()
    fetching.join()


def tell_of_a_stranger() -> None:
    """From now on, once: a reference that is sent names an owner whom nobody knows."""
    service = _service_of(current_agent())
    handle_class, pack = next(iter(service.packs.items()))
    registered = service.agent.packing._packs

    def pack_stranger(_handle: Any, _peer: Any) -> Packed:
        registered[handle_class] = (service, pack)
        packed = Packed(77, service.new_id(), service.new_id(), service.me, 5)
        service.transfer.packed.append(packed)
        return packed

    registered[handle_class] = (service, pack_stranger)


@on_worker(0)
def test_reference_whose_owner_nobody_knows_leaves_nothing():
    rpc.rpc_sync("w1", tell_of_a_stranger)

    with pytest.raises(UnknownWorker):
        rpc.rpc_sync("w1", give_reference)

    info = rpc.get_debug_info()
    assert info["user_rrefs"] == info["pending_users"] == 0
