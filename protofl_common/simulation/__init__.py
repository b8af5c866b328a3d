"""The engine of `protofl run`: a federation without SuperLink."""
