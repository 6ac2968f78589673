"""The one optimizer of a run: a rule for every group of parameters, and the state of all as named tensors.

The only place where weights change. The only state is the step counter and the slots. A parameter without a gradient
counts as one whose gradient is zero. Nothing waits for the device.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.errors import RunError
from paceline.kernels.row_gradients import RowGradients, coalesced
from paceline.optim.newton_schulz import Iteration, orthogonalise
from paceline.optim.rule import Event, Orthogonalise, RuleContext, Slot, find_rule, global_norm, no_more
from paceline.settings.groups import GroupSettings, ParamGroup
from paceline.settings.optim import MuonConfig

NamedParams = Mapping[str, nn.Parameter]


class Optimizer:
    """Moves every parameter by the rule of its group. `row_gradients`: by parameter, those of rules that want rows."""

    def __init__(
        self,
        params: Mapping[str, NamedParams],
        groups: Mapping[str, ParamGroup],
        context: RuleContext,
        *,
        clip_norm: float | None = None,
        row_gradients: Mapping[str, RowGradients] | None = None,
    ) -> None:
        _check_names(params)
        self.groups = {name: dict(named) for name, named in params.items() if named}
        self.param_groups = {name: groups[name] for name in self.groups}
        self.rules = {name: find_rule(groups[name].rule)(groups[name], n, context) for name, n in self.groups.items()}
        self.clip_norm, self.steps_taken = clip_norm, 0
        self._sync, self._row_gradients = context.sync, dict(row_gradients or {})
        self._row_sums: dict[str, tuple[Tensor, Tensor]] = {}
        # groups whose gradients may still be on their way after the backward pass
        self._late = {n for n, named in self.groups.items() if any(map(self._sync.is_deferred, named.values()))}
        self._skipped: Tensor | None = None  # how many steps were, counted on the device, fp32
        self._pending = {
            name: torch.zeros_like(param, memory_format=torch.contiguous_format)
            for group, named in self.groups.items()
            if groups[group].every > 1
            for name, param in named.items()
        }
        """Gradients of groups that do not move at every step, summed since they last moved."""

    @torch.no_grad()
    def step(self, settings: Mapping[str, GroupSettings], *, skip: Tensor | None = None) -> None:
        """Move every group whose settings say so, by the gradients that are there now; with `clip_norm` they are scaled
        in place first. Where `skip` (bool, 0-D, on the parameters' device) is true, weights and state stay as they are,
        whatever the gradients hold. Groups whose gradients are here work first, while deferred ones travel."""
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        self.steps_taken += 1
        if skip is not None:
            self._skipped = skip.float() if self._skipped is None else self._skipped + skip
        finishes = [self._start(name, settings[name], skip) for name in self.rules if name not in self._late]
        self._sync.await_gradients()
        finishes += [self._start(name, settings[name], skip) for name in self.rules if name in self._late]
        for finish in finishes:
            finish()
        self._sync.finish_gathers()

    def _start(self, name: str, settings: GroupSettings, skip: Tensor | None) -> Callable[[], None]:
        every = self.param_groups[name].every
        if every > 1:
            self._add_pending(self.groups[name], moves=settings.moves, skip=skip)
        if not settings.moves:
            return no_more
        step, skipped = -(-self.steps_taken // every), self._skipped
        if every > 1 and skipped is not None:  # from the steps that counted, which is what a checkpoint holds
            skipped = step - torch.ceil((self.steps_taken - skipped) / every)
        rows = {n: self._rows(n) for n in self.groups[name] if n in self._row_gradients}
        return self.rules[name].start(Event(settings=settings, step=step, skipped=skipped, skip=skip, rows=rows))

    def _add_pending(self, named: NamedParams, *, moves: bool, skip: Tensor | None) -> None:
        """Take what earlier steps have left into the gradients, or leave these for later. A skipped step drops its own,
        and what was left, if it would have moved."""
        for name, param in named.items():
            pending, fresh = self._pending[name], param.grad
            if fresh is None:
                fresh = param.grad = torch.zeros_like(param)
            if moves:
                fresh.add_(pending)
                pending.zero_()
            else:
                pending.add_(fresh if skip is None else fresh.masked_fill(skip, 0.0))

    def zero_grad(self) -> None:
        """None, not zeros: the first micro-batch then writes its gradient and need not add it."""
        for param in self._all_params():
            param.grad = None
        self.clear_rows()

    def clear_rows(self) -> None:
        self._row_sums.clear()
        for rows in self._row_gradients.values():
            rows.clear()

    def _rows(self, name: str) -> tuple[Tensor, Tensor]:
        """The row gradient of a table over all processes, one for each looked-up token."""
        return self._sync.gather_rows(*self._row_gradients[name].gathered())

    def row_sums(self, name: str) -> tuple[Tensor, Tensor]:
        """The same by distinct indices and summed rows, computed once a step."""
        if name not in self._row_sums:
            self._row_sums[name] = coalesced(*self._rows(name))
        return self._row_sums[name]

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Norm of all gradients as one vector, fp32, 0-D, on their device."""
        self._sync.await_gradients()
        dense, rows = self._sync.norm(self._all_params()), []
        for ids, sums in map(self.row_sums, self._row_gradients):
            repeated = torch.cat([torch.zeros_like(ids[:1], dtype=torch.bool), ids[1:] == ids[:-1]])
            rows.append(sums.masked_fill(repeated[:, None], 0.0))
        return global_norm([dense, global_norm(rows)]) if rows else dense

    def state_dict(self, *, wanted: bool = True, copied: bool = True) -> dict[str, Tensor]:
        """The whole state by name, one entry per parameter and slot whatever the stacking, also before the first step.
        Not `copied`: later steps change it. Where parameters are shared all processes call this; those that do not
        want the state get nothing."""
        skipped = 0 if self._skipped is None else int(self._skipped.item())  # waits for the device
        state = {"step": torch.tensor(self.steps_taken - skipped)} if wanted else {}
        for name, slot in self._slots().items():
            if slot.rows is not None and slot.param is not None:
                whole = self._sync.whole(slot.kept(), slot.param)
                state |= {name: whole.cpu()} if wanted else {}  # to the host: a device need hold one at a time
            elif wanted:
                state[name] = slot.kept().clone() if copied else slot.kept()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Names, shapes and dtypes must all fit; else nothing is changed."""
        slots = self._slots()
        _check_state(state, {"step": Slot([torch.tensor(0)]), **slots})
        self.steps_taken, self._skipped = int(state["step"].item()), None
        for name, slot in slots.items():
            slot.fill(state[name])

    def _clip(self, clip_norm: float) -> None:
        scale = (clip_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)  # 1e-6: as torch.nn.utils.clip_grad_norm_
        grads = [self._sync.own(param, param.grad) for param in self._all_params() if param.grad is not None]
        torch._foreach_mul_(grads, scale)
        for store in self._row_gradients.values():
            store.rows.mul_(scale)
        self._row_sums.clear()

    def _slots(self) -> dict[str, Slot]:
        slots = {name: slot for rule in self.rules.values() for name, slot in rule.state().items()}
        return slots | {f"pending.{name}": Slot([grad]) for name, grad in self._pending.items()}

    def _all_params(self) -> list[nn.Parameter]:
        return [param for named in self.groups.values() for param in named.values()]


def newton_schulz(muon: MuonConfig, iteration: Iteration = orthogonalise, *, bf16_products: bool) -> Orthogonalise:
    """Muon's iteration as the config asks for it, by a back end; in fp32 where the device has no bf16 products."""
    dtype = torch.bfloat16 if muon.ns_dtype == "bf16" and bf16_products else torch.float32
    norm = {"norm_of": muon.ns_norm_of, "maps": muon.ns_maps}
    return partial(iteration, steps=muon.ns_steps, dtype=dtype, association=muon.ns_association, **norm)


def _check_names(params: Mapping[str, NamedParams]) -> None:
    """Each parameter, and each name, in one group only."""
    places: dict[object, str] = {}
    for group, named in params.items():
        for name, param in named.items():
            if before := places.get(name) or places.get(id(param)):
                raise ValueError(f"parameter {name} of group {group!r} is {before} as well; each belongs to one group")
            places[name] = places[id(param)] = f"{name} of group {group!r}"


def _check_state(state: Mapping[str, Tensor], own: Mapping[str, Slot]) -> None:
    cure = "it was written by another model or another --optim.matrices; resume with the config that wrote it"
    if missing := sorted(set(own) - set(state)):
        raise RunError(f"optimizer state lacks {missing[0]} ({len(missing)} missing in all): {cure}")
    if unknown := sorted(set(state) - set(own)):
        raise RunError(f"optimizer state has {unknown[0]} ({len(unknown)} unknown in all): {cure}")
    for name, slot in own.items():
        saved, needed = ((each.dtype, tuple(each.shape)) for each in (state[name], slot))
        if saved != needed:
            needs = f"but this run needs {needed[0]} {needed[1]}"
            raise RunError(f"optimizer state {name} is {saved[0]} {saved[1]}, {needs}: {cure}")
