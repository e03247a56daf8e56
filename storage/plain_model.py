"""A trained model in plain PyTorch: what it computes, its weights, the loss on given tokens, and a few tokens more.

    pip install torch safetensors tokenizers
    python load.py "Once upon a time"

It lies beside config.json, model*.safetensors and tokenizer.json, and needs nothing else: no other file, no pickle, no
network. Training multiplies integers; this is the same function in float32, so its losses are close and not equal.

Suffixes: B windows, S tokens of each, D model width, H query heads, K key/value heads, E head width, V vocabulary.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F


class Model:
    """The weights by name, float32, and the shape that config.json states."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights: dict[str, Tensor] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            self.weights |= load_file(path)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """float32[B, S, V]: of each token, the logits of the next one."""
        x_BSD = self._norm(self.weights["embed"][tokens_BS], "embed_norm")
        for layer, window in enumerate(self.config["attention_windows"]):
            block = f"blocks.{layer:03d}"
            x_BSD = x_BSD + self._attention(self._norm(x_BSD, f"{block}.attn_norm"), block, window)
            x_BSD = x_BSD + self._feed_forward(self._norm(x_BSD, f"{block}.mlp_norm"), block)
        return self._linear(self._norm(x_BSD, "final_norm"), "head")

    def loss(self, tokens_BS: Tensor) -> float:
        """Mean negative log-likelihood, in nats, of every token after the first of each window."""
        losses = [
            F.cross_entropy(self.logits(window[None, :-1])[0].float(), window[1:], reduction="mean")
            for window in tokens_BS.long()
        ]
        return float(torch.stack(losses).double().mean())

    def continued(self, tokens: list[int], count: int) -> list[int]:
        """`count` tokens more, each the likeliest; ends with a text."""
        for _ in range(count):
            seen = torch.tensor([tokens[-self.config["seq_len"] :]])
            tokens = [*tokens, int(self.logits(seen)[0, -1].argmax())]
            if tokens[-1] == self.config["end_of_text"]:
                break
        return tokens

    def _attention(self, x_BSD: Tensor, block: str, window: int) -> Tensor:
        """Causal, over the `window` last tokens; each key/value head serves H / K query heads."""
        q_BHSE, k_BKSE, v_BKSE = (
            self._linear(x_BSD, f"{block}.{name}").unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)
            for name in "qkv"
        )
        k_BHSE, v_BHSE = (
            t.repeat_interleave(q_BHSE.shape[1] // t.shape[1], dim=1) for t in (self._rotated(k_BKSE), v_BKSE)
        )
        place = torch.arange(x_BSD.shape[1])
        back = place[:, None] - place[None, :]
        out_BHSE = F.scaled_dot_product_attention(
            self._rotated(q_BHSE), k_BHSE, v_BHSE, attn_mask=(back >= 0) & (back < window)
        )
        return self._linear(out_BHSE.transpose(1, 2).flatten(-2), f"{block}.o")

    def _rotated(self, x_BHSE: Tensor) -> Tensor:
        """Normalised per head, without a gain; then channels 2i and 2i + 1 turned by the angle t · theta^(−2i/E)."""
        x_BHSE = self._norm(x_BHSE)
        sequence, width = x_BHSE.shape[-2:]
        angles = torch.arange(sequence).double()[:, None] * float(self.config["rope_theta"]) ** (
            -torch.arange(0, width, 2).double() / width
        )
        cos, sin, even, odd = angles.cos().float(), angles.sin().float(), x_BHSE[..., 0::2], x_BHSE[..., 1::2]
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
def main(prompt: str, count: int = 32) -> None:
    """Print the prompt and how the model goes on."""
    folder = Path(__file__).resolve().parent
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    print(tokenizer.decode(Model(folder).continued(tokens, count)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "The")
