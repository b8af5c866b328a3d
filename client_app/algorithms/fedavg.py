"""FedAvg, client half: train the global model on the client's own data.

Source: McMahan et al., AISTATS 2017.
Other half: `server_app/strategies/fedavg.py`.
Down: the weights w of the global model. Up: the weights w_i after local training. Stays: nothing
but the data. Buffers (batch-normalisation statistics) travel and are averaged with the weights.
"""

from client_app.algorithms.base import ClientAlgorithm, H


class FedAvg(ClientAlgorithm[H]):
    """Cross-entropy, starting each round from the global model."""

    state: tuple[str, ...] = ()
