"""The command line: `trainstream run`, `info`, `fit`, `report` and `bench`."""
