"""Rejection sampling of drafts that were drawn from a distribution of their own."""

from torch import Tensor


def accept_or_draw(
    probabilities: Tensor, drafts: Tensor, draft_probabilities: Tensor, uniform: Tensor, noise: Tensor
) -> Tensor:
    """Accepts the draft d of a row with probability min(1, p(d) / q(d)), and otherwise draws from max(p - q, 0).

    So the token of each row has distribution p, whatever q is. Nothing is read on the host, and all shapes depend only
    on the shapes of the arguments. If rounding leaves nothing of max(p - q, 0), a row draws from p, which is q then.

    Source: Leviathan et al., https://arxiv.org/abs/2211.17192, theorem 1.

    Args:
        probabilities: p, [rows, vocabulary].
        drafts: int64 [rows]; -1 in rows without a draft, which draw from p.
        draft_probabilities: q, [rows, vocabulary], from which each draft was drawn. Rows without a draft may hold
            anything, and q(d) of NaN counts as no draft.
        uniform: [rows], random numbers between 0 and 1.
        noise: [rows, vocabulary], of an exponential distribution. Neither depends on the drafts.

    Returns:
        int64 [rows].
    """
    places = drafts.clamp(min=0).unsqueeze(1)
    of_draft = draft_probabilities.gather(1, places).squeeze(1)
    is_drawn = (drafts >= 0) & (of_draft > 0)
    is_accepted = is_drawn & (uniform * of_draft < probabilities.gather(1, places).squeeze(1))
    rest = (probabilities - draft_probabilities.masked_fill(~is_drawn.unsqueeze(1), 0.0)).clamp(min=0.0)
    rest = rest + probabilities * (rest.amax(dim=-1, keepdim=True) <= 0)
    tokens = (rest / noise).argmax(dim=-1)
    # no `where`: Gaudi's compiler is known to get it wrong for integers
    return tokens + (drafts - tokens) * is_accepted
