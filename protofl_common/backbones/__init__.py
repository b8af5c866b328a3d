"""Frozen pre-trained backbones, three of them embedded: images -> features, for algorithms such as FedPCL."""
