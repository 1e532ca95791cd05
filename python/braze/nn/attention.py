"""Attention layers, around torch's ``scaled_dot_product_attention``."""

import torch

from braze._stock import calls
from braze.nn import functional as F


@calls("multi_head_attention_forward")
class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``, whose self-attention copies nothing.

    Where query, key and value are one tensor and the averaged weights are not wanted, the attention
    reads its three parts where the product of the input leaves them, and what it returns is the
    output projection's input as it stands. torch's layer makes a copy of the parts and of each
    transposition, and backward fills three tensors with zeros for one third of gradients each, and
    adds them up. Shapes, dtypes, results and dropout are torch's. In every other case (masks other
    than a causal one, other keys, weights that are wanted, inference) torch's layer runs.
    """

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
        is_causal=False,
    ):
        # torch's layer refuses the hint that a mask is causal without the mask.
        plain = not need_weights and is_causal == (attn_mask is not None)
        if not (plain and self._attends_to_itself(query, key, value, key_padding_mask)):
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        heads = self.num_heads, self.head_dim
        # [batch and positions in either order, 3, heads, elements of a head]
        parts = F.linear(query, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, *heads))
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        result = torch.nn.functional.scaled_dot_product_attention(
            *(part.permute(order) for part in parts.unbind(2)),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
        )
        joined = result.permute(back).flatten(2)
        return F.linear(joined, self.out_proj.weight, self.out_proj.bias), None

    def _attends_to_itself(self, query, key, value, key_padding_mask):
        """Whether this is training of self-attention over a batch, of all positions."""
        return (
            query is key is value
            and key_padding_mask is None
            and query.dim() == 3
            and not query.is_nested
            and query.shape[-1] == self.embed_dim
            and self._qkv_same_embed_dim
            and self.bias_k is None
            and self.bias_v is None
            and not self.add_zero_attn
            # torch has a kernel for all of it where no gradients are wanted.
            and (torch.is_grad_enabled() or torch.is_autocast_enabled(query.device.type))
            and not self._gives_way()
        )
