"""Torch's own test suites, run against gradwire through the drop-in.

python -m tests.conformance.torch_suites                     all suites
python -m tests.conformance.torch_suites RpcTest             one suite
python -m tests.conformance.torch_suites RpcTest.test_add    one test
python -m tests.conformance.torch_suites --fast              a part, under two minutes
python -m tests.conformance.torch_suites --torch RpcTest     against torch itself
"""

from __future__ import annotations

import sys
from pathlib import Path

# Ranks import these modules by the names that they have seen from tests/.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    from conformance.torch_suites.command import main

    sys.exit(main())
