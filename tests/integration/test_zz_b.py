from __future__ import annotations
import time
import pytest, torch
import autograd_handlers as fn
from autograd_functions import call, parameter
from gradwire import autograd
from on_worker import on_worker
pytestmark = pytest.mark.multiproc

def own():
    return parameter("p")

def slow(grad):
    time.sleep(0.2)

@on_worker(0)
def test_through():
    x = parameter("x")
    with autograd.context() as ctx:
        y = call("w2", fn.affine, x)
        y.register_hook(slow)
        z = call("w1", own)
        z.register_hook(slow)
        loss = (z * x).sum() + y.sum()
        print(autograd.grad(ctx, [loss], [x]), flush=True)
