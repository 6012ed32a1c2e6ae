"""Remote calls and distributed autograd for PyTorch."""
