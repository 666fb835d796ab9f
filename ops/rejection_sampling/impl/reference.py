"""Rejection sampling as operations of torch, on any device."""

from torch import Tensor


def accept_or_draw(
    probabilities: Tensor, drafts: Tensor, draft_probabilities: Tensor, uniform: Tensor, noise: Tensor
) -> Tensor:
    """See `accept_or_draw` of `api.py`.

    Source: Leviathan et al., https://arxiv.org/abs/2211.17192, theorem 1.
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
