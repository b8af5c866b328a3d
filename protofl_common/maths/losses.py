"""Loss terms as pure functions of tensors; each names its equation and its shapes.

Symbols: B samples of a batch, with labels int64 in [0, C) of C classes; D dimensions; M clients; P
client prototypes; G prototypes of all classes, several of a class; K trainable prototypes or
centres, one of a class.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import (
    cosine_similarity,
    cross_entropy,
    kl_div,
    log_softmax,
    normalize,
    softplus,
)

EPSILON = 1e-6  # of FedPU, see `positive_unlabelled_risk`
SMALLEST = 1e-8  # task losses below it count as it: both may be 0 to the precision of float32


# -- holding features near the prototype of their class (FedProto, FedTGP, FedORGP)
def one_hot(labels_B: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return labels as one-hot rows [B, C].

    PyTorch's own looks at single labels, which ``vmap`` cannot: DP-SGD would go sample by sample.
    """
    return torch.eye(classes, dtype=dtype, device=labels_B.device)[labels_B]


def prototype_alignment(
    features_BD: Tensor,
    labels_B: Tensor,
    prototypes_CD: Tensor,
    present_C: Tensor,
    distance: str,
    granularity: str,
) -> Tensor:
    """FedProto's regulariser L_R = Σ_j d(C_i^(j), C̄^(j)) (Eq. 5 and 6), on one batch; a scalar.

    Features z = f(x) with labels int64 in [0, C); global prototypes C̄, of classes ``present_C``
    only. ``distance`` d: ``l2`` ‖a−b‖₂ · ``squared-l2`` ‖a−b‖₂² · ``l1`` ‖a−b‖₁ · ``mse``
    ‖a−b‖₂²/D. ``granularity``:

    ``class``       C_i^(j) is the mean of the batch's features of class j, summed over the classes
                    j of the batch
    ``class-mean``  the same, averaged over those of them that have a prototype (FedTGP's E_c,
                    Eq. 11)
    ``sample``      d of every single sample to its class's prototype, divided by B (the authors'
                    code, with ``mse``)
    """
    if granularity == "sample":
        distances_B = _distance(features_BD - prototypes_CD[labels_B], distance)
        return (distances_B * present_C[labels_B]).sum() / len(labels_B)
    if granularity not in ("class", "class-mean"):
        raise ValueError(f"granularity is {granularity!r}, not class, class-mean or sample")

    one_hot_BC = one_hot(labels_B, len(present_C), features_BD.dtype)
    counts_C = one_hot_BC.sum(0)
    means_CD = (one_hot_BC.T @ features_BD) / counts_C.clamp(min=1).unsqueeze(1)
    counted_C = present_C & (counts_C > 0)
    distances_C = _distance(means_CD - prototypes_CD, distance)
    total = (distances_C * counted_C).sum()
    return total if granularity == "class" else total / counted_C.sum().clamp(min=1)


def _distance(difference_ND: Tensor, distance: str) -> Tensor:
    """d of each row, [N]. The gradient of ``l2`` at 0 is 0, not NaN."""
    if distance == "l2":
        norms_N: Tensor = torch.linalg.vector_norm(difference_ND, dim=1)
        return norms_N
    if distance == "l1":
        return difference_ND.abs().sum(1)
    if distance == "mse":
        return difference_ND.square().mean(1)
    if distance == "squared-l2":
        return difference_ND.square().sum(1)
    raise ValueError(f"distance is {distance!r}, not l2, squared-l2, l1 or mse")


def angular_alignment(
    features_BD: Tensor, labels_B: Tensor, prototypes_CD: Tensor, present_C: Tensor
) -> Tensor:
    """1 − cos(z, p_y), averaged over the batch; a scalar.

    Samples of classes that ``present_C`` leaves out count as 0.
    """
    cosines_B = (normalize(features_BD) * normalize(prototypes_CD)[labels_B]).sum(1)
    return ((1 - cosines_B) * present_C[labels_B]).mean()


# -- contrast of samples with prototypes (FedPCL, FedPLVM), and within a batch (SupCon)
def prototype_contrast(
    features_BD: Tensor,
    labels_B: Tensor,
    sets_MCD: Tensor,
    present_MC: Tensor,
    temperature: float,
    with_own: bool,
) -> Tensor:
    """−log [ exp(z·C^(y)/τ) / Σ_{y_a ∈ A(y)} exp(z·C^(y_a)/τ) ], averaged; a scalar.

    FedPCL (Tan et al., NeurIPS 2022). Features z and prototypes C have unit length: the caller
    normalises them. The loss of a sample is the mean over the sets that count for it, 0 if none
    does; the result is the mean over all samples of the batch.

    With one set, the global prototypes, it is L_g (Eq. 8); with the clients' padded sets it is L_p
    (Eq. 9). ``sets_MCD``, ``present_MC``: M tables of one prototype per class, and which of them
    exist; a set counts for a sample only if it has the sample's class and another one to contrast
    with. A(y) is the labels distinct from y, as the text defines it, or ``with_own`` all labels,
    the usual InfoNCE.
    """
    scaled_BMC = torch.einsum("bd,mcd->bmc", features_BD, sets_MCD) / temperature
    own_B1C = one_hot(labels_B, present_MC.shape[1], torch.bool).unsqueeze(1)
    present_BMC = present_MC.unsqueeze(0)
    others_BMC = present_BMC & ~own_B1C
    counted_BM = (present_BMC & own_B1C).any(2) & others_BMC.any(2)

    against_BMC = present_BMC if with_own else others_BMC
    # a finite stand-in for −∞: rows that do not count would else give NaN gradients
    against_BM = scaled_BMC.masked_fill(~against_BMC, -1e9).logsumexp(2)
    own_BM = (scaled_BMC * own_B1C).sum(2)
    loss_BM = torch.where(counted_BM, against_BM - own_BM, 0.0)
    return (loss_BM.sum(1) / counted_BM.sum(1).clamp(min=1)).mean()


def supervised_contrast(features_BD: Tensor, labels_B: Tensor, temperature: float) -> Tensor:
    """SupCon within a batch, averaged over samples with a partner; a scalar.

    −1/|P(i)| Σ_{p ∈ P(i)} log [ exp(z_i·z_p/τ) / Σ_{a ≠ i} exp(z_i·z_a/τ) ], P(i) the others of i's
    class (Khosla et al., NeurIPS 2020, Eq. 2, one view).
    """
    scaled_BB = features_BD @ features_BD.T / temperature
    self_BB = torch.eye(len(labels_B), dtype=torch.bool, device=labels_B.device)
    log_sums_B1 = scaled_BB.masked_fill(self_BB, -1e9).logsumexp(1, keepdim=True)
    log_shares_BB = scaled_BB - log_sums_B1

    same_class_BB = labels_B.unsqueeze(0) == labels_B.unsqueeze(1)
    partners_BB = same_class_BB & ~self_BB
    counted_B = partners_BB.any(1)
    losses_B = -(log_shares_BB * partners_BB).sum(1) / partners_BB.sum(1).clamp(min=1)
    return torch.where(counted_B, losses_B, 0.0).sum() / counted_B.sum().clamp(min=1)


def sparse_similarity(
    features_BD: Tensor, prototypes_GD: Tensor, alpha: float, floor: float
) -> Tensor:
    """FedPLVM's s_α(z, g) = cos(z, g)^α (Wang et al., NeurIPS 2024, Eq. 7), [B, G].

    ``floor`` > 0: cosines below it count as ``floor`` and pass no gradient. Features after a ReLU
    have cosines in [0, 1], and the slope of x^α at 0 is infinite; the paper is silent about it.
    """
    cosines_BG = normalize(features_BD, dim=1) @ normalize(prototypes_GD, dim=1).T
    return cosines_BG.clamp(min=floor).pow(alpha)


def sparse_contrast(
    similarity_BG: Tensor, own_BG: Tensor, temperature: float, rivals_BG: Tensor | None = None
) -> Tensor:
    """L_contra = −log [ Σ_{g ∈ G^y} exp(s_α/τ) / Σ_{g ∈ G} exp(s_α/τ) ] (Eq. 6); a scalar.

    The contrast of FedPLVM (Wang et al., NeurIPS 2024), averaged over the batch. ``similarity_BG``
    is s_α of each sample and prototype (`sparse_similarity`); ``own_BG`` bool says which prototypes
    g are of the sample's class y. Samples whose class has none count as 0. ``rivals_BG`` bool says
    which prototypes G has for a sample; None: all.
    """
    scaled_BG = similarity_BG / temperature
    if rivals_BG is not None:
        scaled_BG = scaled_BG.masked_fill(~(rivals_BG | own_BG), -torch.inf)
    # a row without own prototypes is −∞ here, so its loss is infinite: `_over_present` drops it
    own_B = torch.logsumexp(scaled_BG.masked_fill(~own_BG, -torch.inf), dim=1)
    return _over_present(torch.logsumexp(scaled_BG, dim=1) - own_B, own_BG)


def sparse_correction(similarity_BG: Tensor, own_BG: Tensor, mean: bool = False) -> Tensor:
    """L_corr = | Σ_{g ∈ G^y} s_α − C_y | (Eq. 8), averaged; a scalar.

    C_y is the number of prototypes of class y. With ``mean`` divided by C_y: by the letter, the
    term and its gradient grow with the number of prototypes.
    """
    losses_B = ((similarity_BG - 1) * own_BG).sum(dim=1).abs()
    if mean:
        losses_B = losses_B / own_BG.sum(dim=1).clamp(min=1)
    return _over_present(losses_B, own_BG)


def centre_correction(features_BD: Tensor, prototypes_GD: Tensor, own_BG: Tensor) -> Tensor:
    """How far features point away from the centre of their class's prototypes; a scalar.

    2 (cos(z, c) − 1)², averaged over the batch, where c is the mean of G^y, the prototypes of the
    sample's class y. FedPLVM's authors have this in their code (commit 867b5f1) instead of the
    paper's Eq. 8: the cosine is not raised to the power α. ``own_BG`` as in `sparse_contrast`.
    """
    sums_BD = own_BG.to(prototypes_GD.dtype) @ prototypes_GD
    centres_BD = sums_BD / own_BG.sum(dim=1, keepdim=True).clamp(min=1)
    cosines_B = cosine_similarity(features_BD, centres_BD)
    return _over_present(2 * (cosines_B - 1).square(), own_BG)


def _over_present(loss_B: Tensor, own_BG: Tensor) -> Tensor:
    """The mean over the batch, in which samples without a prototype of their class count as 0.

    A loss of such a sample may be infinite, so it is replaced, and not multiplied by 0.
    """
    return torch.where(own_BG.any(dim=1), loss_B, 0.0).sum() / len(loss_B)


def model_contrast(
    features_BD: Tensor, received_BD: Tensor, previous_BD: Tensor, temperature: float
) -> Tensor:
    """MOON's contrast of models (Li et al., CVPR 2021, Eq. 3), averaged over the batch; a scalar.

    −log [ e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) ]: the features of
    each sample shall be like those of the model that was received, and unlike the previous one's.
    """
    to_received_B = cosine_similarity(features_BD, received_BD)
    to_previous_B = cosine_similarity(features_BD, previous_BD)
    return softplus((to_previous_B - to_received_B) / temperature).mean()


# -- losses over client prototypes, at the server (FedTGP, FedORGP)
def margin_contrast(
    samples_PD: Tensor,
    labels_P: Tensor,
    targets_KD: Tensor,
    margin: float,
    rivals_PK: Tensor | None = None,
) -> Tensor:
    """FedTGP's contrastive loss with ``margin`` δ ≥ 0 (Eq. 10); a scalar.

    −log [ e^{−(φ(p, t_y)+δ)} / ( e^{−(φ(p, t_y)+δ)} + Σ_{k≠y} e^{−φ(p, t_k)} ) ], φ the Euclidean
    distance, averaged over client prototypes p. ``rivals_PK`` bool says which k count for p; None:
    all.
    """
    distances_PK = euclidean_distances(samples_PD, targets_KD)
    own_PK = one_hot(labels_P, len(targets_KD), distances_PK.dtype)
    logits_PK = -(distances_PK + margin * own_PK)
    if rivals_PK is not None:
        logits_PK = logits_PK.masked_fill(~rivals_PK, -torch.inf)
    return cross_entropy(logits_PK, labels_P)


def euclidean_distances(samples_PD: Tensor, targets_KD: Tensor) -> Tensor:
    """φ of every pair, [P, K], by matrix products.

    Their gradient is many times faster than that of `torch.cdist`. Both are moved to the targets'
    mean first, which keeps the products small. Distances below 3·10⁻⁵ count as it and pass no
    gradient.
    """
    middle_D = targets_KD.detach().mean(dim=0)
    samples_PD = samples_PD - middle_D
    targets_KD = targets_KD - middle_D
    squares_P1 = samples_PD.square().sum(dim=1, keepdim=True)
    squares_PK = squares_P1 + targets_KD.square().sum(dim=1)
    squares_PK = torch.addmm(squares_PK, samples_PD, targets_KD.T, alpha=-2)
    return squares_PK.clamp_min(1e-9).sqrt()


def nearest_distances(centres_KD: Tensor) -> Tensor:
    """min_{l≠k} φ(q_k, q_l) of each centre, [K]; one 0 for fewer than two centres.

    Their mean is FedSA's margin.
    """
    if len(centres_KD) < 2:
        return centres_KD.new_zeros(1)
    return torch.cdist(centres_KD, centres_KD).fill_diagonal_(torch.inf).amin(dim=1)


def orthogonality(samples_PD: Tensor, labels_P: Tensor, targets_KD: Tensor, gamma: float) -> Tensor:
    """(1 − cos(p, t_y)) + γ · mean over k ≠ y of |cos(p, t_k)|, averaged over p; a scalar.

    p are client prototypes (FedORGP).
    """
    cosines_PK = normalize(samples_PD) @ normalize(targets_KD).T
    own_PK = one_hot(labels_P, len(targets_KD), cosines_PK.dtype)
    own_P = (cosines_PK * own_PK).sum(1)
    others_P = (cosines_PK.abs() * (1 - own_PK)).sum(1) / max(1, len(targets_KD) - 1)
    return (1 - own_P + gamma * others_P).mean()


# -- learning from class probabilities: another model's (FedKD: Wu et al., Nature Communications
# 2022), or a mean of them in the place of a label (FD: Jeong et al., 2018)
def divergence(logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
    """KL(q ‖ p), averaged over samples, of the probabilities p of logits and q of targets.

    Detach the targets if they are fixed.
    """
    log_q_BC = log_softmax(targets_BC, dim=1)
    log_p_BC = log_softmax(logits_BC, dim=1)
    return kl_div(log_p_BC, log_q_BC, reduction="batchmean", log_target=True)


def adaptive(distance: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """Divide a distance between two models by the sum of their task losses.

    Who is wrong teaches and learns little. ``own``: the task loss of the model that learns, which
    also learns through it; the ``other`` is fixed.
    """
    return distance / torch.clamp(own + other.detach(), min=SMALLEST)


def class_distillation(
    logits_BC: Tensor, labels_B: Tensor, targets_CC: Tensor, known_C: Tensor
) -> Tensor:
    """FD's regulariser φ(F, F̂_y) = −Σ_c F̂_{y,c} log F_c, averaged over the batch; a scalar.

    F = softmax(logits). ``targets_CC`` has F̂_y in row y for each class of ``known_C``; samples of
    the others contribute nothing.
    """
    entropy_B = -(targets_CC[labels_B] * log_softmax(logits_BC, dim=1)).sum(1)
    return (entropy_B * known_C[labels_B]).sum() / len(labels_B)


# -- learning from unlabelled samples beside labelled ones (FedPU: Lin et al., ICML 2022)
def positive_unlabelled_risk(
    logits_BC: Tensor, labels_B: Tensor, labelled_C: Tensor, unlabelled: int, non_negative: bool
) -> Tensor:
    """The risk R of FedPU on a random batch of the client's training samples; a scalar.

    Labels are -1 for none. p_c(x) = softmax of the logits; K the classes that a client has labelled
    samples of, ``labelled_C`` of each (n_c), at least one; U its ``unlabelled`` samples; π_c the
    part of class c among U. Our text on FedProto takes this loss from FedPU's published code and
    prints no equation. The risk is that of unbiased learning from positive and unlabelled data (du
    Plessis et al., NeurIPS 2014), for every class of K against the rest:

        R = 1/|K| · Σ_{c∈K} ( E_{x∈U} [ −log(1 − p_c(x)) ]
                              −  π_c · E_{x labelled c} [ −log(1 − p_c(x)) ] )

    In words: an unlabelled sample is not of class c, except for the part π_c of them that is.
    Labels are hidden at random within each class, so π_c is the part of class c among the labelled
    samples: no hidden label is looked at.

    As in that code, −log(1 − p_c + ε) stands for −log(1 − p_c). Without ε the risk has no lower
    bound: it falls for ever as the model gets surer of the samples whose labels it knows, and drags
    the features along. (The code also divides the first expectation by C in place of |K|.)

    The expectations are the batch's sums over the numbers of U and of class c that a batch of B has
    on average. So (without ``non_negative``) the mean over the batches of an epoch is the risk of
    all samples, whatever the batch size; means over the batch itself would lose the second term
    wherever no labelled sample falls into the batch.

    With ``non_negative``, each class's difference counts as 0 where it is negative (Kiryo et al.,
    NeurIPS 2017): the risk itself is not negative, but its estimate is once the few labelled
    samples are known by heart.
    """
    present_K = torch.nonzero(labelled_C).flatten()
    counts_K = labelled_C[present_K].to(logits_BC.dtype)
    labelled = counts_K.sum()
    against_BK = loss_of_absence(logits_BC)[:, present_K]
    hidden_B1 = (labels_B < 0).unsqueeze(1)
    own_BK = labels_B.unsqueeze(1) == present_K

    average = len(labels_B) / (labelled + unlabelled)  # part of all samples that is in a batch
    unlabelled_K = (against_BK * hidden_B1).sum(0) / (average * unlabelled)
    positive_K = (against_BK * own_BK).sum(0) / (average * counts_K)
    risk_K = unlabelled_K - counts_K / labelled * positive_K
    if non_negative:
        risk_K = risk_K.clamp(min=0)
    return risk_K.mean()


def loss_of_absence(logits_BC: Tensor) -> Tensor:
    """−log(1 − p_c + ε) of every sample and class, [B, C]; for C of at least 2.

    1 − p_c is the part of the other classes, so with the logits s, −log(1 − p_c) is
    log(1 + exp(s_c − log Σ_{j≠c} exp s_j)): finite, and with gradients of at most 1, however sure
    the model is. ε bounds it by −log ε = 13.8.
    """
    classes = logits_BC.shape[1]
    itself_CC = torch.eye(classes, dtype=torch.bool, device=logits_BC.device)
    logits_BCC = logits_BC.unsqueeze(1).expand(-1, classes, -1)
    others_BC = logits_BCC.masked_fill(itself_CC, float("-inf")).logsumexp(2)
    against_BC = softplus(logits_BC - others_BC)
    return -torch.logaddexp(-against_BC, against_BC.new_full((), math.log(EPSILON)))
