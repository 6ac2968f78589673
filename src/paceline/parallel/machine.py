"""What a run runs on: device, number formats and back ends, and what it has to do without there."""

import os
from dataclasses import dataclass, replace

import torch

from paceline.backends.registry import OPERATIONS, Chosen, Request, choose
from paceline.core.errors import ConfigError
from paceline.core.probe import Choice, choose_device, choose_products, compiler
from paceline.parallel.batch_split import rank_batch
from paceline.parallel.ranks import SINGLE_PROCESS, Ranks
from paceline.settings.groups import ParamGroup, param_groups, rules
from paceline.settings.model import DType
from paceline.settings.run import RunConfig, TrainConfig
from paceline.settings.schedule import batches_of
from paceline.settings.spec import describe


@dataclass(frozen=True)
class Machine:
    """What the run runs on, and what it had to do without."""

    device: torch.device
    backends: Chosen
    request: Request  # what the back ends were chosen by
    bf16: bool
    notes: tuple[str, ...]
    lacks: tuple[str, ...] = ()  # notes that a person may want to act on; they are printed when a run starts


def inspect_machine(config: RunConfig, ranks: Ranks = SINGLE_PROCESS) -> tuple[RunConfig, Machine]:
    """The config as this machine can carry it out, and the machine. Nothing is allocated."""
    checked_groups(config, ranks)  # first: the fit to memory asks the rules, too
    shares = [rank_batch(batch, ranks.world, config.parallel.context_parallel) for batch in batches_of(config)]
    device = choose_device(config.train.device)
    own_device = _device_of_rank(device, ranks)  # before the probes, which ask the current GPU
    lacks = []
    if config.train.compile and not (verdict := compiler(device.name)).usable:
        lacks.append(f"not compiled, hence slower: {verdict.reason}")
        config = replace(config, train=replace(config.train, compile=False))
    if config.train.compile and ranks.world > 1 and config.parallel.context_parallel > 1:
        flag = f"--parallel.context-parallel {config.parallel.context_parallel}"
        lacks.append(f"not compiled, hence slower: under {flag} ranks exchange halos inside a pass")
        config = replace(config, train=replace(config.train, compile=False))
    if (limit := config.train.memory_limit_gib) is not None and (micro := config.batch.micro_tokens) is not None:
        effect = "only a cap" if device.name == "cuda" else "of no effect on a CPU"
        why = f"--batch.micro-tokens {micro:,} says how a step is cut"
        lacks.append(f"--train.memory-limit-gib {limit:g} is {effect}: {why}")
    wanted = config.model.precision.compute
    products = choose_products(wanted, device.name)
    backends, request = choose_backends(config, device.name, "bf16" if products.name == "bf16" else "fp32")
    notes = [f"{what} {choice.name}: {choice.reason}" for what, choice in {"device": device, **vars(backends)}.items()]
    if ranks.world > 1:
        slices = "" if (parts := config.parallel.context_parallel) == 1 else f", 1/{parts} of each of its sequences"
        tokens = " to ".join(f"{n:,}" for n in sorted({share.tokens for share in shares}))
        notes.append(f"{ranks.world} ranks: each takes {tokens} tokens of a step{slices}")
    if products.name != wanted:
        note = f"products in {products.name} instead of {wanted}: {products.reason}"
        (lacks if device.name == "cuda" else notes).append(note)  # on a CPU that is the rule
        config = replace(config, model=replace(config.model, precision=replace(config.model.precision, compute="fp32")))
    bf16 = choose_products("bf16", device.name).name == "bf16"
    return config, Machine(own_device, backends, request, bf16, (*notes, *lacks), tuple(lacks))


def checked_groups(config: RunConfig, ranks: Ranks) -> dict[str, ParamGroup]:
    """The parameter groups, each with a rule that can take its gradients; raises before anything is allocated."""
    parameters = describe(config.model).parameters
    groups = param_groups(config.optim, describe(config.model).groups)
    for parameter in parameters:
        group = groups[parameter.group]
        facts, rule, its = rules()[group.rule], f"rule {group.rule!r}", f"{parameter.name} of group {group.name!r}"
        wanted = facts.gradient
        if facts.matrices and len(parameter.shape) != 2:
            raise ConfigError(f"optim.groups: {rule} moves matrices, but {its} has shape {parameter.shape}")
        if wanted != parameter.gradient and parameter.gradient != "either":
            raise ConfigError(f"optim.groups: {rule} takes {wanted} gradients, but {its} has {parameter.gradient} ones")
        if group.every > 1 and (wanted == "rows" or (config.parallel.fsdp and ranks.world > 1)):
            why = "under --parallel.fsdp" if config.parallel.fsdp else f"by {rule}"
            raise ConfigError(f"optim.groups: {group.name!r} with every {group.every} cannot be moved {why}; use 1")
    return groups


def choose_backends(config: RunConfig, device: str, compute: DType) -> tuple[Chosen, Request]:
    """`compute` is the format of products on this device. Nothing is allocated."""
    request = Request(
        model=config.model,
        device=device,
        compute=compute,
        compiled=config.train.compile,
        custom_kernels=config.train.custom_kernels,
        deterministic=config.train.deterministic,
        lm_head_chunk_tokens=config.lm_head.chunk_tokens,
    )
    found: dict[str, Choice] = {}
    for operation in OPERATIONS:
        asked = getattr(config, operation, None)
        found[operation] = choose(operation, "auto" if asked is None else asked.backend, request)
        if operation == "matmul":
            request = replace(request, matmul=found[operation].name)
    return Chosen(**found), request


def _device_of_rank(chosen: Choice, ranks: Ranks) -> torch.device:
    """A GPU of its own for each rank, made current: streams and waits without a name mean it. A CPU is shared."""
    if chosen.name != "cuda" or ranks.world == 1:
        return torch.device(chosen.name)
    if ranks.local_rank >= (found := torch.cuda.device_count()):
        cure = f"use --nproc-per-node {found}, or --train.device cpu"
        raise ConfigError(f"rank {ranks.rank} finds no GPU of its own: this machine has {found}; {cure}")
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def set_torch_switches(train: TrainConfig) -> None:
    """Process-wide settings of torch; set once per run, never at import."""
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    torch.use_deterministic_algorithms(train.deterministic)
    if train.deterministic:  # cuBLAS reads it at its first product; torch refuses products without it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if train.compile:
        from torch._dynamo import config as dynamo  # here: it takes 1.2 s, for which other runs need not wait
        from torch._inductor import config as inductor

        inductor.coordinate_descent_tuning = train.coordinate_descent and not train.deterministic
        if hasattr(inductor, "deterministic"):  # not in every torch: choose no kernel by timing, if the bits show it
            inductor.deterministic = train.deterministic
        dynamo.optimize_ddp = False  # one graph: see parallel/gradients.py
    if train.expandable_segments and torch.cuda.is_available():
        older = torch.cuda.memory._set_allocator_settings  # deprecated where the other is there
        getattr(torch._C, "_accelerator_setAllocatorSettings", older)("expandable_segments:True")
    if train.memory_limit_gib is not None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, train.memory_limit_gib * 2**30 / total))
