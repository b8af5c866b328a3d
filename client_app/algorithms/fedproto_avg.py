"""FedProto with model averaging, client half: FedProto's loss on the averaged model.

FedPLVM and FPL compare with it.
Other half: `server_app/strategies/fedproto_avg.py`.
Symbols and equations: `client_app/algorithms/fedproto.py`, with settings of its own
(``fedproto-avg.lambda`` …).

Down: weights and global prototypes. Up: weights, local prototypes and how many samples stand behind
each. Stays: nothing but the data.

Deviations: FedProto itself never sends weights. Where all clients have the same architecture, later
papers (FPL, CVPR 2023; FedPLVM, NeurIPS 2024) report it with FedAvg's averaging; this is that row
of their tables.
"""

from client_app.algorithms.fedproto import FedProto


class FedProtoAvg(FedProto):
    """FedProto's loss and prototypes on FedAvg's model.

    The paper's prediction is the classifier's.
    """

    state: tuple[str, ...] = ()
