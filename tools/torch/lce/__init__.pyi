"""The package's types; tests/pytorch/test_package.py compares them with the functions themselves."""
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

__version__: str
__all__: list[str]

Output = Literal["z_loss", "correct", "max_logit", "predicted", "log_sum_sq_probs"]
Model = TypeVar("Model", bound=torch.nn.Module)

@overload
def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
                         ignore_index: int | None = -100, reduction: Literal["mean", "sum", "none"] = "mean",
                         label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = 0.0,
                         temperature: float | Tensor = 1.0, token_weights: Tensor | None = None,
                         class_weights: Tensor | None = None, chunk: int = 0, sampling: float = 0.0,
                         skip_ignored: bool = False, batch_invariant: bool = False, group: ProcessGroup | None = None, vocab_size: int | None = None,
                         outputs: tuple[()] = ()) -> Tensor: ...
@overload
def linear_cross_entropy(*tensors: Tensor, outputs: Sequence[Output], **options: Any) -> tuple[Tensor, ...]: ...
@overload
def linear_cross_entropy(*, input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor: ...
def linear_log_probs(x: Tensor, weight: Tensor, target: Tensor, temperature: float | Tensor = 1.0, *,
                     bias: Tensor | None = None, softcap: float | None = 0.0, ignore_index: int | None = -100, chunk: int = 0,
                     entropy: bool = True, skip_ignored: bool = False, batch_invariant: bool = False, group: ProcessGroup | None = None, vocab_size: int | None = None,
                     outputs: Sequence[Output] = ()) -> tuple[Tensor, ...]: ...
def linear_ids_log_probs(x: Tensor, weight: Tensor, ids: Tensor, temperature: float | Tensor = 1.0, *,
                         bias: Tensor | None = None, softcap: float | None = 0.0, ignore_index: int | None = -100,
                         chunk: int = 0, offsets: Tensor | None = None, entropy: bool = False, skip_ignored: bool = False,
                         batch_invariant: bool = False) -> tuple[Tensor, ...]: ...
@overload
def linear_divergence(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor,
                      kind: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl", *, beta: float = 0.5,
                      bias: Tensor | None = None, teacher_bias: Tensor | None = None, temperature: float | Tensor = 1.0,
                      teacher_temperature: float | Tensor | None = None, softcap: float | None = 0.0,
                      teacher_softcap: float | None = 0.0, scale: float = 1.0, teacher_scale: float = 1.0,
                      mask: Tensor | None = None, token_weights: Tensor | None = None,
                      reduction: Literal["mean", "sum", "none"] = "mean", chunk: int = 0, skip_ignored: bool = False,
                      entropy: Literal[False] = False, group: None = None) -> Tensor: ...
@overload
def linear_divergence(*tensors: Tensor, entropy: Literal[True], **options: Any) -> tuple[Tensor, Tensor]: ...
def log_mass(log_probs: Tensor, ids: Tensor, offsets: Tensor | None = None) -> Tensor: ...
def renormalized(log_probs: Tensor, ids: Tensor, offsets: Tensor | None = None) -> Tensor: ...
def topk_kl(log_probs: Tensor, teacher: Tensor, ids: Tensor, *, reverse: bool = False, rest: bool = True) -> Tensor: ...

class LinearCrossEntropy(torch.nn.Linear):
    def __init__(self, hidden_size: int, vocab_size: int, bias: bool = False, *, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None, **options: Any) -> None: ...
    def forward(self, x: Tensor, target: Tensor | None = None, **options: Any) -> Tensor: ...

def patch_transformers(model: Model, *, return_logits: bool | None = None, **options: Any) -> Model: ...
def unpatch_transformers(model: Model) -> Model: ...
def patch_trl(*, chunk: int = 0) -> None: ...
def unpatch_trl() -> None: ...
