#!/usr/bin/env python3
"""Makes muon.txt in this directory: three steps of torch.optim.Muon, scaled to AdamW's size, on odd matrices.

  make_muon_golden.py

PyTorch's Newton-Schulz runs in bf16 whatever the matrix; here its module finds float64 under that name, so that only the
formula is left. Matrices and gradients are exact in bf16. Made with torch 2.15.0; needs nothing else.

A line has rate, decay, momentum, steps and the number of matrices. Then of each, line by line: rows and columns; the first
weights; the gradients of all steps; the momentum and the weights at the end.
"""
import pathlib

import torch
import torch.optim._muon as muon

SHAPES = [(7, 19), (19, 7), (13, 13), (1, 5)]
SETTINGS = dict(lr=0.5, weight_decay=0.125, momentum=0.75)
STEPS = 3


class Float64:
    """torch, but that its bfloat16 is float64."""
    bfloat16 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def main():
    muon.torch = Float64()
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
