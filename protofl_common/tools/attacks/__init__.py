"""Attacks on the messages of one's own runs: `protofl audit`."""
