"""The one optimizer of a run: Muon for the matrices, Adam for the rest, and the state of both as named tensors.

The only place where weights change. Rates and momentum come in with each step (`schedules.py` computes them), so the
only state is the step counter and the buffers, and the same step always does the same work: a parameter without a
gradient counts as one whose gradient is zero. No global state is read or changed, and nothing waits for the device.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.core.errors import RunError
from paceline.optim.adam import Adam
from paceline.optim.config import AdamConfig, MuonConfig, OptimConfig
from paceline.optim.muon import Muon, Orthogonalise, ShareWork, all_here
from paceline.optim.newton_schulz import orthogonalise, orthogonalise_symmetric
from paceline.optim.slots import Slot
from paceline.optim.tables import AllHere, Tables, global_norm

ParamClass = Literal["matrices", "embeddings", "head", "scalars"]
NamedParams = Mapping[str, nn.Parameter]


class Optimizer:
    """Moves every parameter by the rule of its class.

    `parts` names fused matrices: how many equal parts they have, or the rows of each. Without `bf16_products` the
    Newton–Schulz iteration runs in fp32 whatever the config asks. `compiled` compiles that iteration; rates and
    momentum stay outside of it, so nothing recompiles when they change. `fused` takes kernels that compute symmetric
    products once, where they know the config. `share_work` spreads the iteration over processes;
    `tables` says which rows of a parameter are kept here."""

    def __init__(
        self,
        params: Mapping[ParamClass, NamedParams],
        config: OptimConfig,
        *,
        parts: Mapping[str, int | Sequence[int]] | None = None,
        bf16_products: bool,
        compiled: bool = False,
        fused: bool = False,
        share_work: ShareWork = all_here,
        tables: Tables | None = None,
    ) -> None:
        _check_names(params, parts or {})
        self.config = config
        self.classes: dict[ParamClass, dict[str, nn.Parameter]] = {kind: dict(named) for kind, named in params.items()}
        self.steps_taken = 0
        self._skipped: Tensor | None = None
        """How many of them were none, counted on the device, fp32."""
        by_muon = self.classes.get("matrices", {}) if config.matrices == "muon" else {}
        by_adam = {kind: named for kind, named in self.classes.items() if named is not by_muon}
        self._tables = tables or AllHere()
        self._muon = Muon(
            by_muon,
            config.muon,
            parts=parts or {},
            orthogonalise=_newton_schulz(config.muon, bf16_products=bf16_products, compiled=compiled, fused=fused),
            share_work=share_work,
            tables=self._tables,
        )
        self._adams = _adams(by_adam, config.adam, self._tables)

    @torch.no_grad()
    def step(self, *, lr_scale: float, momentum: float, skip: Tensor | None = None) -> None:
        """Move every parameter once, by the gradients that its `.grad` holds now.

        `lr_scale` multiplies every base rate; `momentum` is Muon's at this step. With `clip_norm` the gradients are
        scaled in place first. Where `skip` (bool, 0-D, on the parameters' device) is true, weights and state stay as
        they are, whatever the gradients hold; the host need not know."""
        if self.config.clip_norm is not None:
            self._clip(self.config.clip_norm)
        self.steps_taken += 1
        if skip is not None:
            self._skipped = skip.float() if self._skipped is None else self._skipped + skip
        lr = self.config.muon.lr * lr_scale
        self._muon.step(lr=lr, momentum=momentum, skip=skip, meanwhile=partial(self._step_adam, lr_scale, skip))
        self._tables.finish_gathers()

    def _step_adam(self, lr_scale: float, skip: Tensor | None) -> None:
        """Between Muon's work and its moves: tables' gradients travel during the one, their rows during the other."""
        self._tables.await_gradients()
        for adam in self._adams:
            adam.step(step=self.steps_taken, lr_scale=lr_scale, skip=skip, skipped=self._skipped)

    @torch.no_grad()
    def measured_step(
        self, *, lr_scale: float, momentum: float, skip: Tensor | None = None
    ) -> dict[ParamClass, Tensor]:
        """`step`, and for each class the norm of its update over the norm of its weights, as fp32 0-D tensors.

        The weights are those after the step, so that a class that starts at 0 gives 1 and not infinity; a class at rest
        at 0 gives 0. Costs a copy of all weights, hence a method of its own."""
        before = {kind: [param.clone() for param in named.values()] for kind, named in self.classes.items()}
        self.step(lr_scale=lr_scale, momentum=momentum, skip=skip)
        return {kind: _ratio(before[kind], list(named.values())) for kind, named in self.classes.items() if named}

    def zero_grad(self) -> None:
        """Forget all gradients. None, not zeros: the first micro-batch then writes its gradient and need not add it."""
        for param in self._all_params():
            param.grad = None

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Norm of all gradients as one vector, fp32, 0-D, on their device."""
        self._tables.await_gradients()
        return self._tables.norm(self._all_params())

    def state_dict(self, *, wanted: bool = True, copied: bool = True) -> dict[str, Tensor]:
        """The whole state by name, one entry per parameter and slot whatever the stacking. Later steps do not change
        it, unless it is asked for not `copied`: for somebody who copies it at once. The names are there before the
        first step. Where tables are shared all processes must call this; those that do not want the state help and get
        nothing."""
        state = {"step": torch.tensor(self._steps_counted())} if wanted else {}
        for name, slot in self._slots().items():
            if slot.table is not None:
                whole = self._tables.whole(slot.kept(), slot.table)
                state |= {name: whole.cpu()} if wanted else {}  # to the host: a device need hold one at a time
            elif wanted:
                state[name] = slot.kept().clone() if copied else slot.kept()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`, bit for bit. Names, shapes and dtypes must all fit; else nothing is changed."""
        slots = self._slots()
        _check_state(state, {"step": Slot([torch.tensor(0)]), **slots})
        self.steps_taken, self._skipped = int(state["step"].item()), None
        for name, slot in slots.items():
            slot.fill(state[name])

    def _steps_counted(self) -> int:
        """Steps that moved something. Waits for the device if any may have been skipped."""
        return self.steps_taken - (0 if self._skipped is None else int(self._skipped.item()))

    def _clip(self, clip_norm: float) -> None:
        scale = (clip_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)  # 1e-6: as torch.nn.utils.clip_grad_norm_
        grads = [self._tables.own(param, param.grad) for param in self._all_params() if param.grad is not None]
        torch._foreach_mul_(grads, scale)

    def _slots(self) -> dict[str, Slot]:
        slots = self._muon.state()
        for adam in self._adams:
            slots |= adam.state()
        return slots

    def _all_params(self) -> list[nn.Parameter]:
        return [param for named in self.classes.values() for param in named.values()]


def _ratio(before: list[Tensor], after: list[Tensor]) -> Tensor:
    update_norm = global_norm([new - old for new, old in zip(after, before, strict=True)])
    return torch.where(update_norm > 0, update_norm / global_norm(after), 0.0)


def _newton_schulz(muon: MuonConfig, *, bf16_products: bool, compiled: bool, fused: bool) -> Orthogonalise:
    dtype = torch.bfloat16 if muon.ns_dtype == "bf16" and bf16_products else torch.float32
    if fused and dtype == torch.bfloat16 and muon.ns_association == "polynomial_first":
        return partial(orthogonalise_symmetric, steps=muon.ns_steps, dtype=dtype, norm_of=muon.ns_norm_of)
    iteration = torch.compile(orthogonalise, fullgraph=True, dynamic=False) if compiled else orthogonalise
    return partial(
        iteration, steps=muon.ns_steps, dtype=dtype, association=muon.ns_association, norm_of=muon.ns_norm_of
    )


def _adams(classes: Mapping[ParamClass, NamedParams], adam: AdamConfig, tables: Tables) -> list[Adam]:
    """Adam objects for these classes: one for all, or one each, which gives the same numbers."""
    rates = {
        "matrices": adam.matrix_lr,
        "embeddings": adam.embedding_lr,
        "head": adam.head_lr,
        "scalars": adam.scalar_lr,
    }
    groups = [(named, rates[kind]) for kind, named in classes.items()]
    objects = [groups] if adam.grouping == "one" else [[group] for group in groups]
    return [Adam(its_groups, adam, tables) for its_groups in objects]


def _check_names(params: Mapping[ParamClass, NamedParams], parts: Mapping[str, object]) -> None:
    """A parameter in two classes would move twice; two of one name would share a slot in a checkpoint."""
    named = [item for group in params.values() for item in group.items()]
    if len({name for name, _ in named}) < len(named) or len({id(param) for _, param in named}) < len(named):
        raise ValueError("a name or a parameter occurs in more than one class; each belongs to exactly one")
    if unknown := set(parts) - set(params.get("matrices", {})):
        raise ValueError(f"parts are given for {', '.join(sorted(unknown))}, which is not among the matrices")


def _check_state(state: Mapping[str, Tensor], own: Mapping[str, Slot]) -> None:
    if missing := sorted(set(own) - set(state)):
        raise RunError(
            f"optimizer state lacks {missing[0]} ({len(missing)} missing in all): it was written by another model or "
            f"another --optim.matrices; resume with the config that wrote it"
        )
    if unknown := sorted(set(state) - set(own)):
        raise RunError(
            f"optimizer state has {unknown[0]} ({len(unknown)} unknown in all), for which this run has no place; "
            f"resume with the config that wrote it"
        )
    for name, slot in own.items():
        if (state[name].shape, state[name].dtype) != (slot.shape, slot.dtype):
            raise RunError(
                f"optimizer state {name} is {state[name].dtype} {tuple(state[name].shape)}, but this run needs "
                f"{slot.dtype} {tuple(slot.shape)}; resume with the config that wrote it"
            )
