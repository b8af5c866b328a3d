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
MASKED = -1e9  # stands for −∞ in a log-sum-exp
MIN_TASK_LOSS = 1e-8  # replaces a smaller sum of task losses: it may be 0 in float32
MIN_SQUARED_DISTANCE = 1e-9  # replaces a smaller one: the slope of the root at 0 is infinite


# -- holding features near the prototype of their class (FedProto, FedTGP, FedORGP)
def one_hot(labels_B: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return labels as one-hot rows [B, C].

    PyTorch's own ``one_hot`` reads the labels' values, which ``vmap`` forbids: DP-SGD would have to
    go sample by sample.
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
    """Return FedProto's regulariser L_R = Σ_j d(C_i^(j), C̄^(j)) (Eq. 5, 6) of a batch; a scalar.

    It draws the features to the global prototypes C̄ of their classes. ``present_C`` bool says which
    classes have one; samples of the others count as 0. ``distance`` d is ``l2`` ‖a−b‖₂,
    ``squared-l2`` ‖a−b‖₂², ``l1`` ‖a−b‖₁, or ``mse`` ‖a−b‖₂²/D. ``granularity`` is

    ``class``       C_i^(j) is the mean of the batch's features of class j; d is summed over the
                    classes j of the batch
    ``class-mean``  the same, but averaged over those of them that have a prototype (FedTGP's E_c,
                    Eq. 11)
    ``sample``      d of every single sample from its class's prototype, summed and divided by B
                    (the authors' code, with ``mse``)
    """
    if granularity == "sample":
        distances_B = _distance(features_BD - prototypes_CD[labels_B], distance)
        return (distances_B * present_C[labels_B]).sum() / len(labels_B)
    if granularity not in ("class", "class-mean"):
        raise ValueError(f"granularity is {granularity!r}, not class, class-mean or sample")

    one_hot_BC = one_hot(labels_B, len(present_C), features_BD.dtype)
    counts_C = one_hot_BC.sum(0)
    # of a class that the batch lacks this mean is 0, not 0 / 0: it does not count
    means_CD = (one_hot_BC.T @ features_BD) / counts_C.clamp(min=1).unsqueeze(1)
    counted_C = present_C & (counts_C > 0)
    distances_C = _distance(means_CD - prototypes_CD, distance)
    total = (distances_C * counted_C).sum()
    return total if granularity == "class" else total / counted_C.sum().clamp(min=1)


def _distance(difference_ND: Tensor, distance: str) -> Tensor:
    """Return d(a, b) for each row a − b of ``difference_ND``, [N]."""
    if distance == "l2":
        norms_N: Tensor = torch.linalg.vector_norm(difference_ND, dim=1)
        return norms_N  # whose gradient at 0 is 0, not NaN
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
    """Return 1 − cos(z, p_y) of features z and their classes' prototypes, averaged; a scalar.

    ``present_C`` bool says which classes have a prototype; samples of the others count as 0.
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
    """Return FedPCL's contrast of features with prototypes (Tan et al., NeurIPS 2022); a scalar.

    For a sample and a set of prototypes it is
    −log [ exp(z·C^(y)/τ) / Σ_{y_a ∈ A(y)} exp(z·C^(y_a)/τ) ], where A(y) are the labels distinct
    from y, as the text defines it, or with ``with_own`` all labels, as in the usual InfoNCE. With
    one set, the global prototypes, the result is L_g (Eq. 8); with a set of each client it is L_p
    (Eq. 9).

    Features z and prototypes C have unit length: the caller normalises them. ``sets_MCD`` are M
    tables of one prototype per class, and ``present_MC`` bool says which of them exist. A set
    counts for a sample only if it has the sample's class and another one to contrast with. The loss
    of a sample is the mean over the sets that count for it, 0 if none does; the result is the mean
    over all samples of the batch.
    """
    scaled_BMC = torch.einsum("bd,mcd->bmc", features_BD, sets_MCD) / temperature
    own_B1C = one_hot(labels_B, present_MC.shape[1], torch.bool).unsqueeze(1)
    present_1MC = present_MC.unsqueeze(0)
    others_BMC = present_1MC & ~own_B1C
    has_own_BM = (present_1MC & own_B1C).any(2)
    counts_BM = has_own_BM & others_BMC.any(2)

    contrasted_BMC = present_1MC if with_own else others_BMC
    # not −∞: a sample may have nothing to contrast with, and its gradient would be NaN
    contrasted_BM = scaled_BMC.masked_fill(~contrasted_BMC, MASKED).logsumexp(2)
    own_BM = (scaled_BMC * own_B1C).sum(2)
    losses_BM = torch.where(counts_BM, contrasted_BM - own_BM, 0.0)
    return (losses_BM.sum(1) / counts_BM.sum(1).clamp(min=1)).mean()


def supervised_contrast(features_BD: Tensor, labels_B: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrast within a batch (SupCon); a scalar.

    −1/|P(i)| Σ_{p ∈ P(i)} log [ exp(z_i·z_p/τ) / Σ_{a ≠ i} exp(z_i·z_a/τ) ], where P(i) are the
    other samples of i's class, averaged over the samples i that have any (Khosla et al., NeurIPS
    2020, Eq. 2, one view). The caller normalises the features z.
    """
    scaled_BB = features_BD @ features_BD.T / temperature
    self_BB = torch.eye(len(labels_B), dtype=torch.bool, device=labels_B.device)
    # not −∞: in a batch of one sample the sum is over nothing, and its gradient would be NaN
    log_sums_B1 = scaled_BB.masked_fill(self_BB, MASKED).logsumexp(1, keepdim=True)
    log_shares_BB = scaled_BB - log_sums_B1

    same_class_BB = labels_B.unsqueeze(0) == labels_B.unsqueeze(1)
    partners_BB = same_class_BB & ~self_BB
    has_partners_B = partners_BB.any(1)
    losses_B = -(log_shares_BB * partners_BB).sum(1) / partners_BB.sum(1).clamp(min=1)
    return torch.where(has_partners_B, losses_B, 0.0).sum() / has_partners_B.sum().clamp(min=1)


def sparse_similarity(
    features_BD: Tensor, prototypes_GD: Tensor, alpha: float, floor: float
) -> Tensor:
    """Return FedPLVM's s_α(z, g) = cos(z, g)^α (Wang et al., NeurIPS 2024, Eq. 7), [B, G].

    Cosines below ``floor``, which is above 0, are replaced by it and pass no gradient. Features
    after a ReLU have cosines in [0, 1], and the slope of x^α at 0 is infinite for α below 1; the
    paper is silent about it.
    """
    cosines_BG = normalize(features_BD, dim=1) @ normalize(prototypes_GD, dim=1).T
    return cosines_BG.clamp(min=floor).pow(alpha)


def sparse_contrast(
    similarity_BG: Tensor, own_BG: Tensor, temperature: float, rivals_BG: Tensor | None = None
) -> Tensor:
    """Return FedPLVM's contrast L_contra (Wang et al., NeurIPS 2024, Eq. 6); a scalar.

    −log [ Σ_{g ∈ G^y} exp(s_α/τ) / Σ_{g ∈ G} exp(s_α/τ) ], averaged over the batch.
    ``similarity_BG`` is s_α of each sample and prototype (`sparse_similarity`); ``own_BG`` bool
    says which prototypes g are of the sample's class y. Samples whose class has none count as 0.
    ``rivals_BG`` bool says which prototypes G has for a sample; None: all.
    """
    scaled_BG = similarity_BG / temperature
    if rivals_BG is not None:
        scaled_BG = scaled_BG.masked_fill(~(rivals_BG | own_BG), -torch.inf)
    # a row without own prototypes is −∞ here, so its loss is infinite: the mean leaves it out
    own_B = torch.logsumexp(scaled_BG.masked_fill(~own_BG, -torch.inf), dim=1)
    return _mean_over_batch(torch.logsumexp(scaled_BG, dim=1) - own_B, own_BG)


def sparse_correction(similarity_BG: Tensor, own_BG: Tensor, mean: bool = False) -> Tensor:
    """Return FedPLVM's correction L_corr = | Σ_{g ∈ G^y} s_α − C_y | (Eq. 8) as a scalar.

    It is the mean over the batch, to which a sample without a prototype of its class adds 0. The
    arguments are those of `sparse_contrast`; C_y is the number of prototypes of class y. As the
    paper has it, the term and its gradient grow with that number; ``mean`` divides by it.
    """
    # Σ (s_α − 1) over the C_y own prototypes
    losses_B = ((similarity_BG - 1) * own_BG).sum(dim=1).abs()
    if mean:
        losses_B = losses_B / own_BG.sum(dim=1).clamp(min=1)
    return _mean_over_batch(losses_B, own_BG)


def centre_correction(features_BD: Tensor, prototypes_GD: Tensor, own_BG: Tensor) -> Tensor:
    """Return how far features point away from the centre of their class's prototypes; a scalar.

    2 (cos(z, c) − 1)², averaged over the batch, where c is the mean of the prototypes of the
    sample's class: those that ``own_BG`` bool marks; a sample without any counts as 0. FedPLVM's
    authors have this in their code (commit 867b5f1) instead of the paper's Eq. 8: the cosine is not
    raised to the power α.
    """
    sums_BD = own_BG.to(prototypes_GD.dtype) @ prototypes_GD
    centres_BD = sums_BD / own_BG.sum(dim=1, keepdim=True).clamp(min=1)
    cosines_B = cosine_similarity(features_BD, centres_BD)
    return _mean_over_batch(2 * (cosines_B - 1).square(), own_BG)


def _mean_over_batch(losses_B: Tensor, own_BG: Tensor) -> Tensor:
    """Return the mean loss; samples without a prototype of their class, in ``own_BG``, count as 0.

    The loss of such a sample may be infinite, so it is replaced, and not multiplied by 0.
    """
    return torch.where(own_BG.any(dim=1), losses_B, 0.0).sum() / len(losses_B)


def model_contrast(
    features_BD: Tensor, received_BD: Tensor, previous_BD: Tensor, temperature: float
) -> Tensor:
    """Return MOON's contrast of models (Li et al., CVPR 2021, Eq. 3), averaged; a scalar.

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
    """Return FedTGP's contrastive loss of trainable prototypes t (Eq. 10); a scalar.

    −log [ e^{−(φ(p, t_y)+δ)} / ( e^{−(φ(p, t_y)+δ)} + Σ_{k≠y} e^{−φ(p, t_k)} ) ], averaged over the
    client prototypes p of ``samples_PD``, where φ is the Euclidean distance, δ ≥ 0 the ``margin``,
    and t_k row k of ``targets_KD``.
    ``rivals_PK`` bool says which k count for p; None: all.
    """
    distances_PK = euclidean_distances(samples_PD, targets_KD)
    own_PK = one_hot(labels_P, len(targets_KD), distances_PK.dtype)
    logits_PK = -(distances_PK + margin * own_PK)
    if rivals_PK is not None:
        logits_PK = logits_PK.masked_fill(~rivals_PK, -torch.inf)
    return cross_entropy(logits_PK, labels_P)


def euclidean_distances(samples_PD: Tensor, targets_KD: Tensor) -> Tensor:
    """Return the Euclidean distance of every pair, [P, K], by ‖p‖² + ‖t‖² − 2 p·t.

    The gradient of matrix products is many times faster than that of `torch.cdist`. Both sides are
    shifted by the targets' mean first, which keeps the products small, and so their rounding.
    Distances below 3·10⁻⁵ are replaced by that and pass no gradient: it would be infinite at 0.
    """
    middle_D = targets_KD.detach().mean(dim=0)
    samples_PD = samples_PD - middle_D
    targets_KD = targets_KD - middle_D
    squares_P1 = samples_PD.square().sum(dim=1, keepdim=True)
    squares_PK = squares_P1 + targets_KD.square().sum(dim=1)
    squares_PK = torch.addmm(squares_PK, samples_PD, targets_KD.T, alpha=-2)
    return squares_PK.clamp_min(MIN_SQUARED_DISTANCE).sqrt()


def nearest_distances(centres_KD: Tensor) -> Tensor:
    """Return the Euclidean distance of each centre from the nearest other one, [K].

    The mean of these distances is FedSA's margin. For fewer than two centres they are [0], of which
    the mean is 0, too.
    """
    if len(centres_KD) < 2:
        return centres_KD.new_zeros(1)
    return torch.cdist(centres_KD, centres_KD).fill_diagonal_(torch.inf).amin(dim=1)


def orthogonality(samples_PD: Tensor, labels_P: Tensor, targets_KD: Tensor, gamma: float) -> Tensor:
    """Return FedORGP's loss of trainable prototypes t; a scalar.

    (1 − cos(p, t_y)) + γ · mean over k ≠ y of |cos(p, t_k)|, averaged over the client prototypes p
    of ``samples_PD``: each t is drawn to the p of its class, and to right angles with all others.
    """
    cosines_PK = normalize(samples_PD) @ normalize(targets_KD).T
    own_PK = one_hot(labels_P, len(targets_KD), cosines_PK.dtype)
    own_P = (cosines_PK * own_PK).sum(1)
    others = max(1, len(targets_KD) - 1)  # a single target has no others: a sum of 0
    others_P = (cosines_PK.abs() * (1 - own_PK)).sum(1) / others
    return (1 - own_P + gamma * others_P).mean()


# -- learning from class probabilities: another model's (FedKD: Wu et al., Nature Communications
# 2022), or a mean of them in the place of a label (FD: Jeong et al., 2018)
def divergence(logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
    """Return KL(q ‖ p), averaged over samples, with p = softmax(logits), q = softmax(targets).

    ``targets_BC`` are logits too; the caller detaches them where they shall not learn.
    """
    log_q_BC = log_softmax(targets_BC, dim=1)
    log_p_BC = log_softmax(logits_BC, dim=1)
    return kl_div(log_p_BC, log_q_BC, reduction="batchmean", log_target=True)


def adaptive_distillation(distance: Tensor, own_loss: Tensor, other_loss: Tensor) -> Tensor:
    """Divide a distance between two models by the sum of their task losses (FedKD).

    So models that are often wrong teach and learn little. Gradients flow through ``own_loss``, the
    task loss of the model that learns, but not through ``other_loss``.
    """
    return distance / torch.clamp(own_loss + other_loss.detach(), min=MIN_TASK_LOSS)


def class_distillation(
    logits_BC: Tensor, labels_B: Tensor, targets_CC: Tensor, present_C: Tensor
) -> Tensor:
    """Return FD's regulariser φ(F, F̂_y) = −Σ_c F̂_{y,c} log F_c, averaged over the batch; a scalar.

    F = softmax(logits); row y of ``targets_CC`` is F̂_y, the mean probabilities of class y.
    ``present_C`` bool says which classes have such a row; samples of the others count as 0.
    """
    cross_entropies_B = -(targets_CC[labels_B] * log_softmax(logits_BC, dim=1)).sum(1)
    return (cross_entropies_B * present_C[labels_B]).sum() / len(labels_B)


# -- learning from unlabelled samples beside labelled ones (FedPU: Lin et al., ICML 2022)
def positive_unlabelled_risk(
    logits_BC: Tensor, labels_B: Tensor, labelled_C: Tensor, unlabelled: int, non_negative: bool
) -> Tensor:
    """Return FedPU's risk R of unlabelled samples, on a random batch of a client's; a scalar.

    A sample without a label has the label -1. p_c(x) is the softmax of the logits. ``labelled_C``
    is the number n_c of the client's labelled samples of each class; K are the classes with any, at
    least one. U are its samples without a label, ``unlabelled`` of them, which must be at least 1
    (with 0 the first expectation is 0 / 0), and π_c is the part of class c among U. The text that
    FedProto is reproduced from takes this loss from FedPU's published code and prints no equation.
    The risk is that of unbiased learning from positive and unlabelled data (du Plessis et al.,
    NeurIPS 2014), for every class of K against the rest:

        R = 1/|K| · Σ_{c∈K} ( E_{x∈U} [ −log(1 − p_c(x)) ]
                              −  π_c · E_{x labelled c} [ −log(1 − p_c(x)) ] )

    In words: an unlabelled sample is not of class c, except for the part π_c of them that is.
    Labels are hidden at random within each class, so π_c is the part of class c among the labelled
    samples: no hidden label is looked at.

    As in that code, −log(1 − p_c + ε) stands for −log(1 − p_c). Without ε the risk has no lower
    bound: it falls for ever as the model gets surer of the samples whose labels it knows, and drags
    the features along. (The code also divides the first expectation by C in place of |K|.)

    Each expectation over U or over a class is the batch's sum, divided by the number of samples of
    U, or of that class, that a random batch of B has on average. So (without ``non_negative``) the
    mean over the batches of an epoch is the risk of all samples, whatever the batch size; means
    over the batch itself would lose the second term wherever no labelled sample falls into the
    batch.

    With ``non_negative``, each class's difference is replaced by 0 where it is negative (Kiryo et
    al., NeurIPS 2017): the risk itself is not negative, but its estimate is, once a model has
    learned the few labelled samples by heart.
    """
    classes_K = torch.nonzero(labelled_C).flatten()
    counts_K = labelled_C[classes_K].to(logits_BC.dtype)
    labelled = counts_K.sum()
    losses_BK = loss_of_absence(logits_BC)[:, classes_K]
    is_unlabelled_B1 = (labels_B < 0).unsqueeze(1)
    is_of_class_BK = labels_B.unsqueeze(1) == classes_K

    part_in_batch = len(labels_B) / (labelled + unlabelled)
    unlabelled_on_average = part_in_batch * unlabelled
    positive_on_average_K = part_in_batch * counts_K
    unlabelled_K = (losses_BK * is_unlabelled_B1).sum(0) / unlabelled_on_average
    positive_K = (losses_BK * is_of_class_BK).sum(0) / positive_on_average_K
    part_of_class_K = counts_K / labelled  # π_c
    risk_K = unlabelled_K - part_of_class_K * positive_K
    if non_negative:
        risk_K = risk_K.clamp(min=0)
    return risk_K.mean()


def loss_of_absence(logits_BC: Tensor) -> Tensor:
    """Return −log(1 − p_c + ε) of every sample and class, [B, C], with p = softmax(logits); C ≥ 2.

    1 − p_c is the sum of the other classes' probabilities, so with the logits s, −log(1 − p_c) is
    log(1 + exp(s_c − log Σ_{j≠c} exp s_j)): finite, and with gradients of at most 1, however sure
    the model is. ε bounds it by −log ε = 13.8.
    """
    classes = logits_BC.shape[1]
    same_class_CC = torch.eye(classes, dtype=torch.bool, device=logits_BC.device)
    logits_BCC = logits_BC.unsqueeze(1).expand(-1, classes, -1)
    others_BC = logits_BCC.masked_fill(same_class_CC, float("-inf")).logsumexp(2)
    losses_BC = softplus(logits_BC - others_BC)  # −log(1 − p_c)
    log_epsilon = losses_BC.new_full((), math.log(EPSILON))
    return -torch.logaddexp(-losses_BC, log_epsilon)  # −log(e^(−loss) + ε)
