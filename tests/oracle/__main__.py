"""Random programs against one process, from the command line.

python -m tests.oracle --count 1000              fresh seeds, all modes
python -m tests.oracle --mode d --seed 123       one program, shown step by step
python -m tests.oracle --mode d --seed 123 --shrink
"""

from __future__ import annotations

import sys
from pathlib import Path

# Workers and tests know these modules under the names they have seen from tests/.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from oracle.command import main

    sys.exit(main())
