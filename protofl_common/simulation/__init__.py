"""The engine of `protofl run`: a federation on this machine, without SuperLink and Ray."""
