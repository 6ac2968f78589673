"""Tile sizes of the attention kernels on a GPU: parity and time of every configuration, FlexAttention as yardstick.

    python benchmarks/attention_tuning.py [--only forward] [--out FILE]

65,536 tokens, 6 heads of 128, bf16, documents of log-normal length (median 650 tokens, sigma 1), windows of 1, 7 and
14 blocks. Median times in milliseconds from a cold cache, all kernels of the pass included. A configuration that does
not compile or fit is reported and skipped; one whose relative error reaches 1e-2 is marked WRONG and cannot win.
"""

import argparse
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from paceline.backends.ranges import Ranges, ranges_of
from paceline.kernels import attention_ranges as kernels
from paceline.kernels.attention import attend_flex, flex_block_mask
from paceline.kernels.attention_ranges import Tiles
from paceline.model.attention import plan_reference
from paceline.model.masks import MaskRule, block_lists
from paceline.settings.model import ModelConfig, WindowConfig

TOKENS, HEADS, WIDTH = 65_536, 6, 128
WINDOW_BLOCKS = (1, 7, 14)
SCALE = WIDTH**-0.5
TOLERANCE = 1e-2
COMPILE_S = 45
CONFIG = ModelConfig(
    num_heads=HEADS,
    head_dim=WIDTH,
    width=HEADS * WIDTH,
    window=WindowConfig(unit="blocks", start_tokens=128, growth_tokens=1664),
    document_mask=True,
)

CONFIGURATIONS: dict[str, list[Tiles]] = {  # around the fastest of benchmarks/results/h200-attention-tuning.json
    "forward": [
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 3),
        Tiles(64, 64, 4, 4),
        Tiles(64, 64, 4, 3, registers=128),
        Tiles(64, 64, 4, 3, registers=168),
        Tiles(64, 32, 4, 3),
        Tiles(64, 32, 4, 4),
        Tiles(64, 32, 4, 4, registers=128),
        Tiles(128, 64, 4, 2),
        Tiles(128, 64, 4, 3),
        Tiles(128, 64, 8, 2, registers=128),
        Tiles(128, 64, 8, 3, registers=128),
        Tiles(128, 32, 8, 3),
        Tiles(128, 32, 8, 4),
        Tiles(128, 32, 8, 4, registers=128),
    ],
    "query_gradient": [
        Tiles(128, 32, 8, 3),
        Tiles(128, 32, 8, 4),
        Tiles(128, 32, 8, 3, registers=128),
        Tiles(128, 32, 4, 3),
        Tiles(128, 64, 8, 3),
        Tiles(128, 64, 8, 2, registers=128),
        Tiles(64, 32, 4, 2),
        Tiles(64, 32, 4, 3),
        Tiles(64, 32, 4, 4),
        Tiles(64, 32, 4, 3, registers=128),
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 2, registers=168),
    ],
    "key_gradient": [
        Tiles(64, 64, 4, 2),
        Tiles(64, 64, 4, 2, registers=168),
        Tiles(64, 64, 4, 2, registers=200),
        Tiles(64, 64, 8, 2),
        Tiles(64, 32, 4, 2),
        Tiles(64, 32, 4, 3),
        Tiles(32, 64, 4, 2),
        Tiles(32, 64, 4, 3),
        Tiles(32, 64, 4, 4),
        Tiles(32, 64, 4, 3, registers=168),
        Tiles(64, 128, 8, 3),
    ],
}


@dataclass(frozen=True)
class Inputs:
    """One layer's attention: q, k, v, the gradient of its output, and the mask at one window."""

    qkv: tuple[Tensor, Tensor, Tensor]
    grad: Tensor
    documents: Tensor
    window: Tensor
    ranges: Ranges


@dataclass(frozen=True)
class Kept:
    """What a backward kernel reads of the passes before it."""

    out: Tensor
    lse: Tensor
    delta: Tensor


def documents_of(tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    lengths = (math.log(650) + torch.randn(tokens // 100, generator=generator)).exp().ceil().long()
    opens = torch.zeros(tokens, dtype=torch.int32)
    starts = lengths.cumsum(0)
    opens[starts[starts < tokens]] = 1
    return opens.cumsum(0, dtype=torch.int32)[None].cuda()


def inputs_of(tokens: int, blocks: int) -> Inputs:
    generator = torch.Generator(device="cuda").manual_seed(0)
    draw = [torch.randn(1, tokens, HEADS, WIDTH, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    documents, window = documents_of(tokens), torch.tensor(128 * blocks, dtype=torch.int32, device="cuda")
    ranges = ranges_of(MaskRule.of(CONFIG), documents, tokens, window)
    return Inputs((draw[0], draw[1], draw[2]), draw[3], documents, window, ranges)


def kept_of(x: Inputs) -> Kept:
    """By the default tiles, which the parity check of `forward` and `query_gradient` judges."""
    out, lse = kernels.launch_forward(*x.qkv, x.ranges.first_key, SCALE, kernels.FORWARD)
    delta = (out.float() * x.grad.float()).sum(-1).transpose(1, 2).contiguous()
    return Kept(out, lse, delta)


def call(kind: str, x: Inputs, kept: Kept | None, tiles: Tiles) -> tuple[Tensor, ...]:
    """One launch of one kind, and of its results those with a judge: (out), (dq) or (dk, dv)."""
    first_key, end_query = x.ranges.first_key, x.ranges.end_query
    if kind == "forward":
        return kernels.launch_forward(*x.qkv, first_key, SCALE, tiles)[:1]
    assert kept is not None
    grads = tuple(torch.empty_like(tensor) for tensor in x.qkv)
    if kind == "query_gradient":
        kernels.launch_query_gradient(x.grad, *x.qkv, kept.out, kept.lse, first_key, SCALE, tiles, grads[0])
        return grads[:1]
    kernels.launch_key_gradient(x.grad, *x.qkv, kept.lse, kept.delta, end_query, SCALE, tiles, *grads[1:])
    return grads[1:]


JUDGED = {"forward": ("out",), "query_gradient": ("q",), "key_gradient": ("k", "v")}


def judge_of(x: Inputs) -> dict[str, Tensor]:
    """The chunked reference in fp32 of the same bf16 values."""
    exact = [t.float().requires_grad_() for t in x.qkv]
    out = plan_reference(CONFIG, x.documents, TOKENS, x.window[None])(CONFIG.layers[0], *exact)
    grads = torch.autograd.grad(out, exact, x.grad.float())
    return dict(zip(("out", "q", "k", "v"), (out.detach(), *grads), strict=True))


def compile_only(task: tuple[str, Tiles]) -> str | None:
    """Fill the compile cache from a process of its own, on a short sequence; the reason where that fails."""
    kind, tiles = task
    try:
        x = inputs_of(1024, 7)
        zeros = torch.zeros(1, HEADS, 1024, device="cuda")
        call(kind, x, Kept(torch.zeros_like(x.grad), zeros, zeros), tiles)
        torch.cuda.synchronize()
    except Exception as error:  # any reason not to fit is a result of this script
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return None


def milliseconds(function: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(function, warmup=10, rep=40, return_mode="median"))


class Flex:
    """Compiled FlexAttention over the same mask; one compilation serves all windows."""

    def __init__(self, documents: Tensor) -> None:
        def test(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (documents[b, q] == documents[b, k])  # the lists hold the window, in blocks

        self.test, self.attend = test, torch.compile(attend_flex, fullgraph=True)

    def run(self, x: Inputs) -> tuple[Callable[[], Tensor], Callable[[], object]]:
        """The forward and the backward pass of one window, compiled and run once."""
        lists = block_lists(MaskRule.of(CONFIG), x.documents, TOKENS, x.window)
        mask = flex_block_mask(lists.full, lists.partial, self.test)
        leaves = [t.detach().requires_grad_() for t in x.qkv]

        def forward() -> Tensor:
            return self.attend(*leaves, mask, scale=SCALE)

        out = forward()

        def backward() -> object:
            return torch.autograd.grad(out, leaves, x.grad, retain_graph=True)

        backward()
        return forward, backward


def describe(tiles: Tiles) -> str:
    capped = "" if tiles.registers is None else f" {tiles.registers} registers"
    return f"{tiles.queries:>3} x {tiles.keys:<3} {tiles.warps} warps {tiles.stages} stages{capped}"


@dataclass(frozen=True)
class Row:
    """One configuration's result: times by window in blocks, or why there are none."""

    kind: str
    tiles: Tiles
    ms: dict[int, float]
    error: float
    failure: str | None = None

    @property
    def right(self) -> bool:
        return self.failure is None and self.error < TOLERANCE

    def line(self) -> str:
        head = f"{self.kind:<16} {describe(self.tiles):<54}"
        if self.failure is not None:
            return f"{head} {self.failure}"
        verdict = "" if self.right else "  WRONG"
        return f"{head} {_times(self.ms)}  error {self.error:.1e}{verdict}"


def _times(ms: dict[int, float]) -> str:
    return "  ".join(f"{time:.3f}" for time in ms.values())


def measure(
    kind: str, tiles: Tiles, windows: dict[int, Inputs], kept: dict[int, Kept], judges: dict[int, dict[str, Tensor]]
) -> Row:
    ms, worst = {}, 0.0
    try:
        for blocks, x in windows.items():
            results = call(kind, x, kept[blocks], tiles)
            for name, result in zip(JUDGED[kind], results, strict=True):
                exact = judges[blocks][name]
                error = float((result.float() - exact).norm() / exact.norm())
                worst = max(worst, error if math.isfinite(error) else math.inf)
            ms[blocks] = milliseconds(lambda x=x, blocks=blocks: call(kind, x, kept[blocks], tiles))
    except Exception as error:  # see compile_only
        return Row(kind, tiles, {}, math.inf, f"{type(error).__name__}: {str(error)[:100]}")
    return Row(kind, tiles, ms, worst)


def compile_all(tasks: list[tuple[str, Tiles]], flex: Flex, x: Inputs) -> list[str | None]:
    """Failures by task. FlexAttention compiles here meanwhile. A compiler that crashes takes its worker along, and its
    task never ends: past the limit, what is missing is compiled when it is timed."""
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pending = pool.map_async(compile_only, tasks, chunksize=1)
        flex.run(x)
        try:
            return pending.get(timeout=COMPILE_S)
        except multiprocessing.TimeoutError:
            print(f"workers did not finish within {COMPILE_S} s of FlexAttention", flush=True)
            return [None] * len(tasks)


def summarize(rows: list[Row], flex_ms: dict[str, dict[int, float]]) -> None:
    print(f"\nbest by the sum over windows of {', '.join(map(str, WINDOW_BLOCKS))} blocks, ms")
    for kind in CONFIGURATIONS:
        right = [row for row in rows if row.kind == kind and row.right]
        print(min(right, key=lambda row: sum(row.ms.values())).line() if right else f"{kind:<16} none")
    for name, ms in flex_ms.items():
        print(f"{'flex ' + name:<16} {'':<54} {_times(ms)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CONFIGURATIONS, action="append", help="kinds to time; default: all")
    parser.add_argument("--out", type=Path, help="also write the rows here, as JSON")
    args = parser.parse_args()
    tasks = [(kind, tiles) for kind in args.only or CONFIGURATIONS for tiles in CONFIGURATIONS[kind]]
    windows = {blocks: inputs_of(TOKENS, blocks) for blocks in WINDOW_BLOCKS}
    flex = Flex(next(iter(windows.values())).documents)
    failures = compile_all(tasks, flex, windows[7])
    flex_ms: dict[str, dict[int, float]] = {"forward": {}, "backward": {}}
    for blocks, x in windows.items():
        for name, function in zip(flex_ms, flex.run(x), strict=True):
            flex_ms[name][blocks] = milliseconds(function)
        print(f"flex, window of {blocks:>2} blocks: forward {flex_ms['forward'][blocks]:.3f} ms, "
              f"backward {flex_ms['backward'][blocks]:.3f} ms", flush=True)  # fmt: skip
    kept = {blocks: kept_of(x) for blocks, x in windows.items()}
    judges = {blocks: judge_of(x) for blocks, x in windows.items()}
    rows = []
    for (kind, tiles), failure in zip(tasks, failures, strict=True):
        if failure is None:
            row = measure(kind, tiles, windows, kept, judges)
        else:
            row = Row(kind, tiles, {}, math.inf, failure)
        rows.append(row)
        print(row.line(), flush=True)
    summarize(rows, flex_ms)
    if args.out is not None:
        args.out.write_text(json.dumps({"flex": flex_ms, "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
