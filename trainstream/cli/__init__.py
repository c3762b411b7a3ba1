"""The command line: `trainstream report` and what it is made of."""
