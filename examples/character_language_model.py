"""A causal language model of characters, trained on the docstrings of Python's standard library; then it writes.

python examples/character_language_model.py                  a minute or two without a GPU
python examples/character_language_model.py --size large     on a GPU
"""

import argparse
import math

import torch
from rich.progress import Progress

import minidl
from minidl import data, nn, ops, optim

SIZES = {
    "small": {"width": 64, "heads": 2, "layers": 2, "context": 64, "batch": 8, "steps": 100, "lr": 3e-3},
    "large": {"width": 384, "heads": 6, "layers": 6, "context": 256, "batch": 64, "steps": 3000, "lr": 1e-3},
}


class Block(nn.Module):
    """Attention to earlier positions and a feed-forward network, each added to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width, act="gelu"), nn.Linear(4 * width, width))

    def forward(self, x, cache=None, position=0):
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # [batch, heads, L, values]
        if cache is None:
            y = ops.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # one position, which sees the keys and values of those before it
            for memory, value in zip(cache, (k, v), strict=True):
                memory[:, :, position] = value[:, :, 0]
            y = ops.scaled_dot_product_attention(q, *cache, lengths=minidl.tensor([position + 1]))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class LanguageModel(nn.Module):
    """The logits of the next character at each position: int64 [batch, L] -> [batch, L, characters]."""

    def __init__(self, characters, width, heads, layers, context):
        super().__init__()
        self.heads, self.context, self.head_size = heads, context, width // heads
        self.embedding, self.position = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x, caches=None, position=0):
        x = self.embedding(x) + self.position.weight[position : position + x.shape[1]]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache, position)
        return self.head(self.norm(x))

    def caches(self):
        """Return memory for the keys and values of each block."""
        return [[minidl.zeros(1, self.heads, self.context, self.head_size) for _ in "kv"] for _ in self.blocks]


@minidl.no_grad()
def write(model, text, temperature=0.8):
    """Return the numbers of characters `text`, continued to the length of the context; each is computed once."""
    caches, text = model.caches(), list(text)
    for position in range(model.context - 1):
        logits = model(minidl.tensor([text[position : position + 1]]), caches, position)[0, 0]
        if position + 1 == len(text):
            text.append(ops.multinomial(ops.softmax(logits / temperature, -1), 1).item())
    return text


def main(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args(words or None)
    width, heads, layers, context, batch, steps, lr = SIZES[arguments.size].values()
    text = "\n\n".join(data.load_text("docstrings").train.texts).encode("ascii", "ignore").decode()
    characters = sorted(set(text))
    number_of = {character: number for number, character in enumerate(characters)}
    numbers = torch.tensor([number_of[character] for character in text])
    minidl.manual_seed(0)
    model = LanguageModel(len(characters), width, heads, layers, context)
    optimizer, losses = optim.AdamW(model.parameters(), lr=lr, max_norm=1.0), []
    with Progress() as progress:
        bar = progress.add_task("", total=arguments.steps or steps)
        for _ in range(arguments.steps or steps):
            rows = torch.randint(len(numbers) - context, (batch, 1)) + torch.arange(context + 1)
            part = minidl.tensor(numbers[rows])
            loss = ops.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.update(bar, advance=1, description=f"loss {losses[-1]:.3f}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; that of equal chances is {math.log(len(characters)):.3f}")
    print("".join(characters[number] for number in write(model, [number_of[each] for each in "Return the "])))
    return model, losses


if __name__ == "__main__":
    main()
