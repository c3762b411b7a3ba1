"""Optimizers whose states live in host memory, with the same bits wherever they are updated.

Importing this imports torch; `import trainstream` alone does not.
"""

from trainstream.optim.adamw import Adam, AdamW

__all__ = ["Adam", "AdamW"]
