from __future__ import annotations

import collections
import pickle
import threading

import pytest
import torch

from gradwire.errors import DecodeError, EncodeError
from gradwire.wire import Reply, encode
from gradwire.wire._pickle import dumps, loads, tensor_at
from gradwire.wire._tensors import TensorTable
from loopback import assert_same_tensor, decode, roundtrip

Pair = collections.namedtuple("Pair", "left right")


class TaggedTensor(torch.Tensor):
    pass


class TaggedParameter(torch.nn.Parameter):
    def __reduce_ex__(self, protocol):
        return TaggedParameter, (self.data.as_subclass(torch.Tensor),)


class Unwilling:
    def __reduce__(self):
        raise LookupError("not today")


class FailsToLoad:
    def __reduce__(self):
        return _explode, ()


def _explode():
    raise LookupError("boom")


@pytest.mark.parametrize(
    "value",
    [
        [1, "a", None],
        {"k": (1, 2)},
        {1, 2},
        Pair(1, 2),
        2**70,
        -(2**63) - 1,
        (2**64, 1),
        "\ud800",
        ("\ud800",),
        (1, (2, 3)),
        bytearray(b"x"),
        1 + 2j,
        torch.float32,
        torch.Size([1, 2]),
        torch.device("cpu"),
        torch.add,
        len,
        int,
        Pair,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_pickled(value):
    found = roundtrip(value)

    assert found == value
    assert type(found) is type(value)


def test_nested_tensors_go_through_the_table():
    tensor = torch.arange(3.0)

    outgoing = encode(Reply(1), {"a": [tensor, tensor], "b": Pair(tensor, 1)})
    value, tensors = decode(outgoing)

    assert outgoing.tensors == [tensor]
    assert value["a"][0] is value["a"][1] is value["b"].left is tensors[0]
    assert_same_tensor(tensors[0], tensor)


def test_tensors_of_a_big_int_tuple_survive_the_second_attempt():
    tensor = torch.arange(3)

    outgoing = encode(Reply(1), (tensor, 2**70))
    value, tensors = decode(outgoing)

    assert value[1] == 2**70
    assert torch.equal(value[0], tensor)
    assert len(tensors) == len(outgoing.tensors) == 1


def test_module_arrives_with_parameters_and_buffers():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    module[0].bias.requires_grad_(False)

    found = roundtrip(module)

    expected = module.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, parameter in module.named_parameters():
        assert_same_tensor(found.get_parameter(name), parameter)
    for name, buffer in module.named_buffers():
        assert_same_tensor(found.get_buffer(name), buffer)


def test_tied_parameters_stay_tied():
    module = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    module[1].weight = module[0].weight

    found = roundtrip(module)

    assert found[0].weight is found[1].weight


def test_tensor_subclass_uses_its_own_reduce():
    tensor = torch.arange(3.0).as_subclass(TaggedTensor)

    outgoing = encode(Reply(1), (tensor,))
    (found,), _ = decode(outgoing)

    assert outgoing.tensors == []
    assert type(found) is TaggedTensor
    assert found.tolist() == [0.0, 1.0, 2.0]


def test_parameter_subclass_uses_its_own_reduce():
    found = roundtrip([TaggedParameter(torch.ones(2))])[0]

    assert type(found) is TaggedParameter
    assert found.requires_grad


def test_lambda_is_refused_with_the_remedy():
    with pytest.raises(
        EncodeError, match=r"lambda.*define it at module level"
    ) as caught:
        encode(Reply(1), [lambda: 1])

    assert caught.value.__cause__ is not None


def test_local_function_is_refused_with_the_remedy():
    def local():
        pass

    with pytest.raises(EncodeError, match=r"local.*define it at module level"):
        encode(Reply(1), {"f": local})


def test_local_class_is_refused_with_the_remedy():
    class Local:
        pass

    with pytest.raises(EncodeError, match=r"Local.*define it at module level"):
        encode(Reply(1), [Local()])


def test_unpicklable_object_is_named():
    with pytest.raises(EncodeError, match=r"builtins.list.*_thread.lock") as caught:
        encode(Reply(1), [threading.Lock()])

    assert isinstance(caught.value.__cause__, TypeError)


def test_error_in_a_users_reduce_is_kept_as_cause():
    with pytest.raises(EncodeError, match=r"Unwilling.*not today") as caught:
        encode(Reply(1), [Unwilling()])

    assert isinstance(caught.value.__cause__, LookupError)


def test_too_deep_nesting_is_refused():
    value: list = []
    for _ in range(100_000):
        value = [value]

    with pytest.raises(EncodeError, match="nested too deeply"):
        encode(Reply(1), value)


def test_future_is_refused():
    with pytest.raises(EncodeError, match=r"futures cannot be sent; wait for it"):
        encode(Reply(1), [torch.futures.Future()])


def test_failure_while_unpickling_keeps_the_cause():
    outgoing = encode(Reply(1), [FailsToLoad()])

    with pytest.raises(DecodeError, match=r"LookupError: boom") as caught:
        decode(outgoing)

    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"cno_such_module\nthing\n.", ["no_such_module", "thing", "by name"]),
        (b"cmath\nthing\n.", ["'math'", "thing", "not by code"]),
    ],
)
def test_missing_global_is_named(line, words):
    with pytest.raises(DecodeError) as caught:
        loads(line, [])

    assert all(word in str(caught.value) for word in words)


def test_reference_to_a_missing_tensor_is_refused():
    table = TensorTable()
    data = dumps([torch.ones(1)], table)

    with pytest.raises(DecodeError, match="IndexError"):
        loads(data, [])


def test_truncated_pickle_is_refused():
    with pytest.raises(DecodeError):
        loads(dumps([1, 2], TensorTable())[:-3], [])


def test_foreign_unpickler_is_told_where_the_tensor_belongs():
    data = dumps([torch.ones(1)], TensorTable())

    with pytest.raises(DecodeError, match="cannot be unpickled elsewhere"):
        pickle.loads(data)
    assert tensor_at.__module__ == "gradwire.wire._pickle"
