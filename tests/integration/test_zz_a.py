from __future__ import annotations
import time
import pytest, torch
import autograd_handlers as fn
from autograd_functions import call, parameter
from gradwire import autograd
from on_worker import on_worker
pytestmark = pytest.mark.multiproc

def wait_idle(grad):
    end = time.monotonic() + 2
    t=time.monotonic(); print("hook", autograd.get_debug_info(), flush=True)
    while autograd.get_debug_info()["passes"] and time.monotonic() < end:
        time.sleep(0.01)
    print("hook ends", autograd.get_debug_info(), time.monotonic()-t, flush=True)


def bad_own():
    return fn.break_backward(parameter("p"))

def body(how, retain):
    with autograd.context(accumulate="grad") as ctx:
        good = call("w2", fn.affine, parameter("x"))
        good.register_hook(wait_idle)
        bad = call("w1", bad_own)
        loss = good.sum() + bad.sum()
        with pytest.raises(Exception) as caught:
            if how == "plain": loss.backward(retain_graph=retain)
            else: ctx.backward(loss, retain_graph=retain)
        print("CAUGHT", how, retain, type(caught.value), str(caught.value)[:100], flush=True)
        assert isinstance(caught.value, fn.Broken)

@on_worker(0)
def test_plain(): body("plain", False)
@on_worker(0)
def test_plain_retain(): body("plain", True)
@on_worker(0)
def test_explicit(): body("explicit", False)
@on_worker(0)
def test_explicit_retain(): body("explicit", True)
