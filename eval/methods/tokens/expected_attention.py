"""Expected Attention (arXiv 2510.00636, section 3): the tokens that future queries can be expected to attend to."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from leank.channel_scores import wide
from leank.eval.inference.prefill import PromptLayer
from leank.eval.methods.axes import method
from leank.eval.methods.common.scored import Scored
from leank.rotary import layer_ropes, rotates_halves
from leank.shape import kv_shape
from leank.typed import Count, Positive

STATIC = ("default", "linear", "llama3", "yarn")  # kinds of RoPE whose frequencies do not depend on the length


@method("expected_attention")
@dataclass(frozen=True)
class ExpectedAttention(Scored):
    """Every KV head keeps the tokens of the largest expected attention times the norm of their value.

      a_j     = softmax_j(mu k_j / sqrt(D) + k_j Sigma k_j / (2 D))
      score_j = (mean over the group's query heads of a_j + epsilon) ||v_j||

    mu and Sigma are mean and covariance of the prompt's queries before RoPE, turned by the RoPE rotation averaged over
    the next `future` positions. For normal queries, the exponent is the logarithm of E[exp(q k_j / sqrt(D))].

    Deviations
    - The value's norm is ||v||, as in kvpress; the paper has ||W_o v||, and epsilon 0.02.
    - At most the last `queries` queries are observed, which bounds memory; the paper takes all of the prompt's.
    - The paper also compresses while decoding, and each head has a budget of its own, which is `adakv` around this.
    """

    queries: Positive = 4096  # last queries of the prompt that are observed
    future: Positive = 512  # positions after the prompt over which RoPE is averaged
    skip: Count = 4  # first tokens, whose queries and keys do not count; the sink should hold them
    covariance: bool = True  # whether Sigma counts
    epsilon: Annotated[float, Ge(0)] = 0.0  # added to the attention

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        check_rope("expected_attention", config)

    def scores(self, layer: PromptLayer, real: Tensor | None, config: PreTrainedConfig) -> Tensor:
        keys = layer.keys.to(wide(layer.keys))
        real = torch.ones_like(keys[:, 0, :, 0], dtype=torch.bool) if real is None else real
        counts = real & (real.cumsum(-1) > self.skip)  # [B, T]
        mean, covariance = self._statistics(layer, counts, config)  # [B, H, G, D], [B, H, G, D, D]
        scaling = keys.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling
        logits = scaling * mean @ keys.mT  # [B, H, G, T]
        if self.covariance:
            logits = logits + scaling**2 / 2 * ((keys[:, :, None] @ covariance) * keys[:, :, None]).sum(-1)
        attention = logits.masked_fill(~counts[:, None, None], -torch.inf).softmax(-1).mean(2)
        return (attention + self.epsilon) * layer.values.to(keys.dtype).norm(dim=-1)

    def _statistics(self, layer: PromptLayer, counts: Tensor, config: PreTrainedConfig) -> tuple[Tensor, Tensor]:
        """Return mu and Sigma of every query head; counts: bool [B, T], the tokens whose queries count."""
        assert layer.queries is not None
        queries = layer.queries[:, :, -self.queries :]
        seen, heads = queries.shape[2], layer.keys.shape[1]
        turned = turn(queries, self._turns(layer, seen, config)).unflatten(1, (heads, -1))  # [B, H, G, n, D]
        weight = counts[:, None, None, -seen:, None].to(turned.dtype)
        weight = weight / weight.sum(3, keepdim=True).clamp(min=1)
        mean = (weight * turned).sum(3, keepdim=True)
        centred = turned - mean
        return mean.squeeze(3), (weight * centred).mT @ centred

    def _turns(self, layer: PromptLayer, seen: int, config: PreTrainedConfig) -> Tensor:
        """For each of the last `seen` columns, the rotation to the average of the next positions: complex [B, n, D/2].

        RoPE turns pair p of a query at position t by exp(i w_p t); only distances count, so columns serve as positions.
        """
        end, device = layer.get_seq_length(), layer.keys.device
        column = torch.arange(end, device=device)[None] if layer.kept is None else layer.kept
        frequency = frequencies(config).to(device)
        future = torch.arange(self.future, device=device)[:, None] * frequency
        average = torch.polar(torch.ones_like(future), future).mean(0)
        back = (end - column[:, -seen:, None]) * frequency
        return average * torch.polar(torch.ones_like(back), back)


def check_rope(name: str, config: PreTrainedConfig) -> None:
    """Raise ValueError, for the choice `name`, if a model's RoPE has no `frequencies`."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in STATIC or not rotates_halves(config) or layer_ropes(config)[0] != rope:
        raise ValueError(
            f"{name} needs a model whose RoPE rotates all channels, p and p + D / 2 together, by {', '.join(STATIC)} "
            f"frequencies that all layers share, not {config.model_type} ({kind}); use snapkv"
        )


def frequencies(config: PreTrainedConfig) -> Tensor:
    """RoPE's frequency of every pair of channels, float64 [D / 2]; `check_rope` says which models have such."""
    rope, dim = getattr(config, "rope_parameters", None) or {}, kv_shape(config)[2]
    kind = rope.get("rope_type", "default")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].double()
    theta: float = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def turn(x: Tensor, by: Tensor) -> Tensor:
    """Vectors x [B, Hq, n, D] whose pairs (p, p + D / 2) are multiplied by complex numbers by [1 or B, n, D / 2]."""
    low, high = x.to(wide(x)).chunk(2, -1)
    real, imaginary = by.real[:, None].to(low.dtype), by.imag[:, None].to(low.dtype)
    return torch.cat([low * real - high * imaginary, low * imaginary + high * real], -1)
