"""Puts the helpers of tests/ on the path, for the folder's own tests."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1]))
