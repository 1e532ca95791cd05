"""What linear and conv2d share: both are bilinear in input and weight, so that the derivatives of
their backward are made of the same ops again."""

import typing


class Saved(typing.NamedTuple):
    """What double_backward() reads of a ctx."""

    saved_tensors: tuple
    output_mask: tuple
    needs_input_grad: tuple


def masked(grads, mask):
    """The gradients that were asked for; None in the place of the others."""
    return [g if m else None for g, m in zip(grads, mask, strict=True)]


def double_backward(ctx, grads, forward, backward, expand_bias):
    """Gradients of `backward` with respect to its grad_output, input and weight.

    Args:
        ctx: of the backward Function: saved grad_output, input and weight; `output_mask`.
        grads: of the gradients of input, weight and bias; None where there is none.
        forward: (input, weight, bias) -> the op's result.
        backward: (grad_output, input, weight, output_mask) -> the op's three gradients.
        expand_bias: a bias, broadcast to the result's shape.
    """
    grad_output, input, weight = ctx.saved_tensors
    to_input, to_weight, to_bias = masked(grads, ctx.output_mask)
    d_grad = d_input = d_weight = None
    if ctx.needs_input_grad[0]:
        terms = []
        if to_input is not None:
            terms.append(forward(to_input, weight, None))
        if to_weight is not None:
            terms.append(forward(input, to_weight, to_bias))
        elif to_bias is not None:
            terms.append(expand_bias(to_bias, grad_output))
        if terms:
            d_grad = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    mask = [
        ctx.needs_input_grad[1] and to_weight is not None,
        ctx.needs_input_grad[2] and to_input is not None,
        False,
    ]
    if any(mask):
        x = input if to_input is None else to_input
        w = weight if to_weight is None else to_weight
        d_input, d_weight, _ = masked(backward(grad_output, x, w, mask), mask)
    return d_grad, d_input, d_weight
