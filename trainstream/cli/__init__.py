"""The command line: `trainstream run`, `info`, `report` and `bench`."""
