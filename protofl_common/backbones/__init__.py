"""Frozen pre-trained backbones: images -> features, for algorithms that train only what comes after (FedPCL).

Three are embedded, so that nothing need be downloaded; see `names` for all. `names` loads no torch.
"""
