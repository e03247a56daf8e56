"""A trained model in plain PyTorch: what it computes, its weights, the loss on given tokens, and how a text goes on.

    pip install torch safetensors tokenizers
    python load.py "Once upon a time"

It lies beside config.json, model*.safetensors and tokenizer.json, and needs nothing else: no other file, no pickle, no
network; and with tokens in place of texts no tokenizers. Training multiplies integers; this is the same function in
float32, so its losses are close and not equal.

Suffixes: B windows, S tokens of each, D model width, H query heads, K key/value heads, E head width, V vocabulary; P
tokens of those before and these.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

Cache = dict[str, tuple[Tensor, Tensor]]  # keys and values [B, K, P, E] of each block, of tokens that were seen


class Model:
    """The weights by name, float32, on one device, and the shape that config.json states."""

    def __init__(self, config: dict[str, Any], weights: Mapping[str, Any], device: str = "cpu") -> None:
        self.config, self.device = config, device
        self.weights = {name: torch.as_tensor(weight, device=device) for name, weight in weights.items()}

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """The model that was exported to a folder."""
        weights: dict[str, Tensor] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            weights |= load_file(path)
        return cls(json.loads((folder / "config.json").read_text(encoding="utf-8")), weights, device)

    def logits(self, tokens_BS: Tensor, cache: Cache | None = None) -> Tensor:
        """float32[B, S, V]: of each token, the logits of the next one. cache: of the tokens before, to which these are
        added; empty at first."""
        cache = {} if cache is None else cache
        x_BSD = self._norm(self.weights["embed"][tokens_BS], "embed_norm")
        for layer, window in enumerate(self.config["attention_windows"]):
            block = f"blocks.{layer:03d}"
            x_BSD = x_BSD + self._attention(self._norm(x_BSD, f"{block}.attn_norm"), block, window, cache)
            x_BSD = x_BSD + self._feed_forward(self._norm(x_BSD, f"{block}.mlp_norm"), block)
        return self._linear(self._norm(x_BSD, "final_norm"), "head")

    def loss(self, tokens_BS: Tensor) -> float:
        """Mean negative log-likelihood, in nats, of every token after the first of each window."""
        losses = [
            F.cross_entropy(self.logits(window[None, :-1])[0].float(), window[1:], reduction="mean")
            for window in tokens_BS.long().to(self.device)
        ]
        return float(torch.stack(losses).double().mean())

    def continued(self, tokens: list[int]) -> Iterator[int]:
        """The tokens that go on after at least one, each the likeliest, until a text or the model's window ends."""
        cache: Cache = {}
        new, seen = tokens, len(tokens)
        while seen < self.config["seq_len"] and new[-1] != self.config["end_of_text"]:
            new = [int(self.logits(torch.tensor([new], device=self.device), cache)[0, -1].argmax())]
            seen += 1
            yield new[0]

    def _attention(self, x_BSD: Tensor, block: str, window: int, cache: Cache) -> Tensor:
        """Causal, over the `window` last tokens; each key/value head serves H / K query heads."""
        q_BHSE, k_BKPE, v_BKPE = (
            self._linear(x_BSD, f"{block}.{name}").unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)
            for name in "qkv"
        )
        first = cache[block][0].shape[2] if block in cache else 0
        q_BHSE, k_BKPE = self._rotated(q_BHSE, first), self._rotated(k_BKPE, first)
        if first:
            k_BKPE, v_BKPE = (torch.cat(pair, dim=2) for pair in zip(cache[block], (k_BKPE, v_BKPE)))
        cache[block] = k_BKPE, v_BKPE
        k_BHPE, v_BHPE = (t.repeat_interleave(q_BHSE.shape[1] // t.shape[1], dim=1) for t in cache[block])
        place = torch.arange(k_BHPE.shape[2], device=self.device)
        back_SP = place[first:, None] - place[None, :]
        mask_SP = (back_SP >= 0) & (back_SP < window)
        out_BHSE = F.scaled_dot_product_attention(q_BHSE, k_BHPE, v_BHPE, attn_mask=mask_SP)
        return self._linear(out_BHSE.transpose(1, 2).flatten(-2), f"{block}.o")

    def _rotated(self, x_BHSE: Tensor, first: int) -> Tensor:
        """Normalised per head, without a gain; then channels 2i and 2i + 1 turned by the angle t · theta^(−2i/E)."""
        x_BHSE = self._norm(x_BHSE)
        sequence, width = x_BHSE.shape[-2:]
        angles = torch.arange(first, first + sequence).double()[:, None] * float(self.config["rope_theta"]) ** (
            -torch.arange(0, width, 2).double() / width
        )
        cos, sin = angles.cos().float().to(self.device), angles.sin().float().to(self.device)
        even, odd = x_BHSE[..., 0::2], x_BHSE[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def _feed_forward(self, x_BSD: Tensor, block: str) -> Tensor:
        gate, up = self._linear(x_BSD, f"{block}.gate_up").chunk(2, dim=-1)
        return self._linear(F.silu(gate) * up, f"{block}.down")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name].T

    def _norm(self, x: Tensor, gain: str = "") -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["norm_eps"])
        return x * self.weights[gain] if gain else x


@torch.inference_mode()
def said(model: Model, tokenizer: Any, tokens: list[int], count: int) -> Iterator[str]:
    """How at most `count` tokens more read, in pieces of whole letters, as soon as each is known."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    for token in islice(model.continued(tokens), count):
        if piece := stream.step(tokenizer, token):
            yield piece


def main(prompt: str, count: int = 32) -> None:
    """Print the prompt and how the model goes on."""
    from tokenizers import Tokenizer

    folder = Path(__file__).resolve().parent
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not tokens:
        sys.exit("an empty text has no token to go on after")
    print(prompt, end="", flush=True)
    for piece in said(Model.load(folder), tokenizer, tokens, count):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "The")
