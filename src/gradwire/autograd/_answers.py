"""Reading the gradients that a message brings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.autograd._messages import Gradient, GradientAndStart, Gradients
from gradwire.autograd._passes import NONE
from gradwire.autograd._run import Answer
from gradwire.errors import RemoteProtocolError
from gradwire.wire import NO_VALUE, decode_value, tracked_tensors

if TYPE_CHECKING:
    from gradwire.transport import Frame
    from gradwire.wire import Serializer

__all__ = ["read_answer", "read_gradients", "to_answers"]


def read_answer(
    message: Gradient | GradientAndStart, frame: Frame, serializer: Serializer
) -> Any:
    """The answer to one message of ours: an `Answer`, or `NONE`.

    Raises:
        RemoteProtocolError: It is malformed.
    """
    if not message.present:
        return NONE
    values, tensors = decode_value(message, frame.head, frame.buffers, None, serializer)
    tracked = tracked_tensors(message, tensors) if message.history >= 0 else []
    if type(values) is not tuple or len(values) != sum(message.present):
        raise RemoteProtocolError("a gradient message is malformed")
    return Answer(message.present, values, tracked, message.history, message.after)


def read_gradients(
    message: Gradients, frame: Frame, serializer: Serializer
) -> tuple[Any, ...]:
    """The gradients of several answers, one after the other.

    Raises:
        RemoteProtocolError: They are malformed.
    """
    values, _ = decode_value(message, frame.head, frame.buffers, None, serializer)
    if values is NO_VALUE:
        values = ()
    if type(values) is not tuple or len(values) != sum(
        [sum(present) for _, present in message.answers]
    ):
        raise RemoteProtocolError("a message of several gradients is malformed")
    return values


def to_answers(message: Gradients, values: tuple[Any, ...]) -> list[tuple[int, Any]]:
    """The answers to several messages of ours, each with the number of the message.

    Args:
        message: What brought them.
        values: Their gradients, from `read_gradients`.
    """
    answers: list[tuple[int, Any]] = []
    first = 0
    for number, present in message.answers:
        gradients = values[first : first + sum(present)]
        first += len(gradients)
        answer = Answer(present, gradients, [], -1, None) if present else NONE
        answers.append((number, answer))
    return answers
