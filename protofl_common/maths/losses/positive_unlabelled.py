"""Learning from unlabelled samples beside labelled ones (FedPU: Lin et al., ICML 2022).

Symbols: B samples of a batch, C classes; p_c(x) = softmax of the logits; K the classes that a client has labelled
samples of, n_c of them of class c; U its unlabelled samples; π_c the part of class c among U.

Our text on FedProto takes this loss from FedPU's published code and prints no equation. The risk is that of unbiased
learning from positive and unlabelled data (du Plessis et al., NeurIPS 2014), for every class of K against the rest:

    R = 1/|K| · Σ_{c∈K} ( E_{x∈U} [ −log(1 − p_c(x)) ]  −  π_c · E_{x labelled c} [ −log(1 − p_c(x)) ] )

In words: an unlabelled sample is not of class c, except for the part π_c of them that is. Labels are hidden at
random within each class, so π_c is the part of class c among the labelled samples: no hidden label is looked at.

As in that code, −log(1 − p_c + ε) stands for −log(1 − p_c). Without ε the risk has no lower bound: it falls for ever
as the model gets surer of the samples whose labels it knows, and drags the features along. (The code also divides the
first expectation by C in place of |K|.)
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-6


def positive_unlabelled_risk(
    logits_BC: Tensor, labels_B: Tensor, labelled_C: Tensor, unlabelled: int, non_negative: bool
) -> Tensor:
    """R on a random batch of the client's training samples, with labels int64 in [0, C), or -1 for none; a scalar.

    The client has labelled ``labelled_C`` samples of each class (n_c), and at least one, ``unlabelled``, not. The
    expectations are the batch's sums over the numbers of U and of class c that a batch of B has on average. So (without
    ``non_negative``) the mean over the batches of an epoch is the risk of all samples, whatever the batch size; means
    over the batch itself would lose the second term wherever no labelled sample falls into the batch.

    With ``non_negative``, each class's difference counts as 0 where it is negative (Kiryo et al., NeurIPS 2017): the
    risk itself is not negative, but its estimate is once the few labelled samples are known by heart.
    """
    present_K = torch.nonzero(labelled_C).flatten()
    counts_K = labelled_C[present_K].to(logits_BC.dtype)
    labelled = counts_K.sum()
    against_BK = not_of_class(logits_BC)[:, present_K]
    hidden_B1 = (labels_B < 0).unsqueeze(1)
    own_BK = labels_B.unsqueeze(1) == present_K
    average = len(labels_B) / (labelled + unlabelled)
    unlabelled_K = (against_BK * hidden_B1).sum(0) / (average * unlabelled)
    positive_K = (against_BK * own_BK).sum(0) / (average * counts_K)
    risk_K = unlabelled_K - counts_K / labelled * positive_K
    return (risk_K.clamp(min=0) if non_negative else risk_K).mean()


def not_of_class(logits_BC: Tensor) -> Tensor:
    """−log(1 − p_c + ε) of every sample and class, [B, C]; for C of at least 2.

    1 − p_c is the part of the other classes, so with the logits s, −log(1 − p_c) is log(1 + exp(s_c − log Σ_{j≠c}
    exp s_j)): finite, and with gradients of at most 1, however sure the model is. ε bounds it by −log ε = 13.8.
    """
    classes = logits_BC.shape[1]
    itself_CC = torch.eye(classes, dtype=torch.bool, device=logits_BC.device)
    others_BCC = logits_BC.unsqueeze(1).expand(-1, classes, -1).masked_fill(itself_CC, float("-inf"))
    against_BC = functional.softplus(logits_BC - others_BCC.logsumexp(2))
    return -torch.logaddexp(-against_BC, against_BC.new_full((), math.log(EPSILON)))
