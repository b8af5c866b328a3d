"""Loss terms as pure functions of tensors, one file per idea; each names its equation and its shapes."""
