"""Tests of the wrapper. Some use parts of its examples, which import each other as scripts do."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "wrapper/examples"))
