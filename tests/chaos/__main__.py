"""Trains a small model while workers are killed, stopped, cut off and restarted.

python -m tests.chaos --minutes 10                  a fresh seed, which is printed
python -m tests.chaos --minutes 10 --seed 7         the same faults again
python -m tests.chaos --minutes 10 --hosts          each worker on a host of its own
"""

from __future__ import annotations

import sys
from pathlib import Path

# Workers and tests know these modules under the names they have seen from tests/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from chaos.command import main

    sys.exit(main())
