"""The delta rule token by token in float64: the definition that every fast path is held to."""

import torch


def delta_rule(k, v, beta, g, state, q=None):
    """Runs one document through the recurrence.

    Args:
        k, q: [T, H, K]; v: [T, H, V]; beta, g: [T, H]; state: [H, K, V].

    Returns:
        the last state [H, K, V] and the reads [T, H, V] (None without q).
    """
    reads = []
    for t in range(len(k)):
        state = g[t].exp()[:, None, None] * state
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        delta = beta[t][:, None] * (v[t] - seen)
        state = state + k[t][:, :, None] * delta[:, None, :]
        if q is not None:
            reads.append(torch.einsum("hkv,hk->hv", state, q[t]))
    if q is None:
        return state, None
    return state, torch.stack(reads) if reads else v.new_zeros(0, *v.shape[1:])


def from_end(k, v, beta, g, q):
    """What a recurrence from the last token to the first holds right before each token."""
    state = k.new_zeros(*k.shape[1:], v.shape[-1])
    reads = []
    for t in reversed(range(len(k))):
        decayed = g[t].exp()[:, None, None] * state
        reads.append(torch.einsum("hkv,hk->hv", decayed, q[t]))
        state, _ = delta_rule(k[t : t + 1], v[t : t + 1], beta[t : t + 1], g[t : t + 1], state)
    return torch.stack(reads[::-1])


def blocks_from_context(context, block, documents, anchors, anchor_documents, bidirectional=False):
    """Each block alone: its document's context before the anchor, then its own tokens.

    Args:
        context: tokens with k, v, beta, g of [T, H, …]; block: q, k, v, beta, g of [N, B, H, …].
        documents: document of each context token.
        anchors, anchor_documents: N ints each.

    Returns:
        [N, B, H, V].
    """
    outputs = []
    heads, width = context.k.shape[1:]
    for n, (anchor, document) in enumerate(zip(anchors, anchor_documents, strict=True)):
        seen = [t for t in range(anchor) if documents[t] == document]
        state = context.k.new_zeros(heads, width, context.v.shape[-1])
        state, _ = delta_rule(
            context.k[seen], context.v[seen], context.beta[seen], context.g[seen], state
        )
        _, reads = delta_rule(block.k[n], block.v[n], block.beta[n], block.g[n], state, block.q[n])
        if bidirectional:
            reads = reads + from_end(block.k[n], block.v[n], block.beta[n], block.g[n], block.q[n])
        outputs.append(reads)
    return torch.stack(outputs)
