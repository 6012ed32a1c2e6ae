"""Numbers of dtypes and layouts on the wire. They are stable: never reuse or reorder."""

from __future__ import annotations

import torch

__all__ = ["CODE_OF_DTYPE", "DTYPES", "SPARSE_LAYOUTS"]

_NAMES: dict[int, str] = {
    1: "float32",
    2: "float64",
    3: "float16",
    4: "bfloat16",
    5: "uint8",
    6: "int8",
    7: "int16",
    8: "int32",
    9: "int64",
    10: "bool",
    11: "complex64",
    12: "complex128",
    13: "complex32",
    14: "uint16",
    15: "uint32",
    16: "uint64",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    21: "float8_e8m0fnu",
    22: "float4_e2m1fn_x2",
    23: "bits8",
    24: "bits16",
    25: "bits1x8",
    26: "bits2x4",
    27: "bits4x2",
    28: "int1",
    29: "int2",
    30: "int3",
    31: "int4",
    32: "int5",
    33: "int6",
    34: "int7",
    35: "uint1",
    36: "uint2",
    37: "uint3",
    38: "uint4",
    39: "uint5",
    40: "uint6",
    41: "uint7",
}

DTYPES: dict[int, tuple[torch.dtype, int]] = {
    # Not every torch has all of them; a code that is absent here is refused on arrival.
    code: (getattr(torch, name), getattr(torch, name).itemsize)
    for code, name in _NAMES.items()
    if hasattr(torch, name)
}
"""Code to dtype and size of an element in bytes. Quantised dtypes are not there."""

CODE_OF_DTYPE: dict[torch.dtype, int] = {
    dtype: code for code, (dtype, _) in DTYPES.items()
}

SPARSE_LAYOUTS: dict[int, torch.layout] = {
    1: torch.sparse_coo,
    2: torch.sparse_csr,
    3: torch.sparse_csc,
    4: torch.sparse_bsr,
    5: torch.sparse_bsc,
}
"""Code to sparse layout; 0 is the strided one."""
