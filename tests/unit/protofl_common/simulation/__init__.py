"""Tests of `protofl_common/simulation`; those of whole runs are in `tests/federation`."""
