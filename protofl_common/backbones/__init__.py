"""Frozen pre-trained backbones: images -> features, for algorithms such as FedPCL.

Three of them are embedded.
"""
