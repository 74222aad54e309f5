#!/usr/bin/env python3
"""Makes muon.txt in this directory: three steps of torch.optim.Muon, scaled to AdamW's size, on odd matrices.

  make_muon_golden.py

Momentum, scale and decay are PyTorch's. For its Newton-Schulz in bf16 its module finds ours, in float64 and by other means:
rows scaled as almost-orthogonal layers, and the polynomials taken of the singular values that an SVD finds. Matrices and
gradients are exact in bf16. Made with torch 2.11.0; needs nothing else.

A line has rate, decay, momentum, steps and the number of matrices. Then of each, line by line: rows and columns; the first
weights; the gradients of all steps; the momentum and the weights at the end.
"""
import pathlib

import torch
import torch.optim._muon as muon

SHAPES = [(7, 19), (19, 7), (13, 13), (1, 5)]
SETTINGS = dict(lr=0.5, weight_decay=0.125, momentum=0.75)
STEPS = 3
POLYNOMIALS = [(7.9845, -21.3937, 14.3833), (3.9641, -2.8377, 0.5158), (3.4368, -2.4752, 0.4762), (2.4901, -1.8343, 0.4368)]


def orthogonalized(x, *_):
    if x.shape[0] > x.shape[1]:
        return orthogonalized(x.T).T
    u, values, v = torch.linalg.svd(x / (x @ x.T).abs().sum(1, keepdim=True).sqrt(), full_matrices=False)
    for a, b, c in POLYNOMIALS:
        values = a * values + b * values**3 + c * values**5
    return u * values @ v


def main():
    muon._zeropower_via_newtonschulz = orthogonalized
    generator = torch.Generator().manual_seed(20241208)
    lines = [[*SETTINGS.values(), STEPS, len(SHAPES)]]

    def draw(*shape):
        return torch.randn(shape, generator=generator).bfloat16().double()
    for shape in SHAPES:
        weight, gradients = draw(*shape), draw(STEPS, *shape)
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = torch.optim.Muon([parameter], adjust_lr_fn="match_rms_adamw", **SETTINGS)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        momentum = optimizer.state[parameter]["momentum_buffer"]
        lines += [shape, *(t.detach().flatten().tolist() for t in (weight, gradients, momentum, parameter))]
    path = pathlib.Path(__file__).resolve().parent / "muon.txt"
    path.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))


if __name__ == "__main__":
    main()
