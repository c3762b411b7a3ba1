"""AdamW and Adam with masters and moments in host memory.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; Kingma and Ba, "Adam",
ICLR 2015. Arithmetic is fp32 whatever the parameters are, and the same bits come from the host's
cores, from a GPU, and from both at once.
"""

import functools
import math
import threading

import torch

from trainstream import errors
from trainstream.optim._early import EarlyUpdates
from trainstream.optim._queue import Update
from trainstream.optim._slot import Slot, bytes_needed, kind_of

ENGINES = ("auto", "host", "stream", "hybrid")
MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# As torch.nn.utils.clip_grad_norm_ has it.
CLIP_EPS = 1e-6


class _HostOptimizer:
    """What Adam and AdamW share; comes before torch's class in the order of bases.

    Being torch's own class too, it validates as torch does, has torch's groups and checkpoints, and
    passes every isinstance.
    """

    def __init__(
        self, params, *args, engine, moments, max_grad_norm, accumulation_steps, seed, **kwargs
    ):
        self._set_up(engine, moments, max_grad_norm, accumulation_steps, seed)
        super().__init__(params, *args, **kwargs)
        self._watch_gradients()

    def _set_up(self, engine, moments, max_grad_norm, accumulation_steps, seed) -> None:
        """All that this class has beside torch's; nothing of it depends on the parameters."""
        _check_choice("engine", engine, ENGINES)
        _check_choice("moments", moments, ("auto", *MOMENTS))
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise errors.bad_argument("max_grad_norm", max_grad_norm, "None or a number above 0")
        if accumulation_steps is not None and (
            type(accumulation_steps) is not int or accumulation_steps < 1
        ):
            raise errors.bad_argument("accumulation_steps", accumulation_steps, "None or 1, 2, ...")
        self._settings = {"engine": engine, "moments": moments, "max_grad_norm": max_grad_norm}
        self._settings |= {"seed": int(seed) % 2**64, "accumulation_steps": accumulation_steps}
        self._slots: dict[torch.Tensor, Slot] = {}
        self._moment_dtype = MOMENTS.get(moments)
        self.grad_norm: float | None = None
        self.share = self._share = (0, 0)
        self._share_lock = threading.Lock()
        self._early: EarlyUpdates | None = None
        self._places: dict[torch.Tensor, tuple[dict, int]] = {}

    def __getstate__(self):
        self.synchronize()
        return {
            **super().__getstate__(),
            "_settings": self._settings,
            "_moment_dtype": self._moment_dtype,
            "_masters": self._masters(),
            "grad_norm": self.grad_norm,
            "share": self.share,
        }

    def __setstate__(self, state):
        if "_settings" not in {**self.__dict__, **state}:  # Torch's class pickled it.
            fresh = AdamW([torch.zeros(1)]).__getstate__()
            state = {**fresh, **state}
        masters = state.pop("_masters", None) if "_settings" in state else None
        self._places = {}
        super().__setstate__(state)
        if masters is not None:  # A copy of another optimizer, with slots of its own.
            self._slots, self._early, self._share = {}, None, (0, 0)
            self._share_lock = threading.Lock()
            for param, master in masters.items():
                self._slot_of(param).set_master(_extension(), master)
            self._watch_gradients()

    @property
    def moment_dtype(self) -> torch.dtype:
        """Type of the moments: torch.float32 or torch.bfloat16."""
        if self._moment_dtype is None:
            configured = MOMENTS.get(_configured("moments"))
            self._moment_dtype = configured or self._choose_moments()
        return self._moment_dtype

    @property
    def engine(self) -> str:
        """Where updates run: "host", "stream" or "hybrid". CPU parameters always use the host."""
        wanted = self._settings["engine"]
        if wanted == "auto":
            wanted = _configured("optimizer")
        if wanted not in ("auto", "stock"):
            return wanted
        params = (p for group in self.param_groups for p in group["params"])
        return "hybrid" if any(p.is_cuda for p in params) else "host"

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of host memory that states took in the last step, read and written: by the host's
        cores, and by the GPU's kernel."""
        slots = list(self._slots.values())
        elements = sum(slot.exp_avg.numel() for slot in slots)
        state_bytes = sum(slot.size_bytes for slot in slots)
        each = 2 * state_bytes / max(elements, 1)
        return tuple(round(each * share) for share in self.share)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for name in ("amsgrad", "capturable", "differentiable"):
            if self.param_groups[-1].get(name):
                self.param_groups.pop()
                raise errors.unsupported_option(type(self).__name__, name)
        self._places = {}

    def _watch_gradients(self) -> None:
        """Updates start in backward where the user said how many gradients make a step, unless
        clipping needs all of them first.
        """
        steps = self._settings["accumulation_steps"]
        if steps is None or self._settings["max_grad_norm"] is not None:
            return
        self._updates().watch(p for group in self.param_groups for p in group["params"])

    def _updates(self) -> EarlyUpdates:
        if self._early is None:
            self._early = EarlyUpdates(self, _extension(), self._settings["accumulation_steps"])
        return self._early

    @property
    def state(self) -> dict:
        """As torch has it. Waits for updates that are under way on the host; where a GPU takes part
        in them, synchronize() before moments are read."""
        early = vars(self).get("_early")
        if early is not None:
            early.wait_on_host()
        return vars(self)["state"]

    @state.setter
    def state(self, value: dict) -> None:
        vars(self)["state"] = value

    def _located(self, param: torch.Tensor) -> tuple[dict, int] | None:
        """A parameter's group, and its number among all parameters. None: it is not ours."""
        if param not in self._places:
            index, self._places = 0, {}
            for group in self.param_groups:
                for other in group["params"]:
                    self._places[other] = group, index
                    index += 1
        return self._places.get(param)

    def synchronize(self) -> None:
        """Waits until every update so far is done."""
        if self._early is not None:
            self._early.wait()
        devices = {p.device for group in self.param_groups for p in group["params"] if p.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    @torch._disable_dynamo  # A compiled training step calls it; it cannot be traced.
    @torch.no_grad()
    def step(self, closure=None):
        """Performs one step.

        Args:
            closure: Reevaluates the model and returns the loss. Default None.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: A gradient is sparse, or a parameter or gradient is of another type than
                float32, bfloat16 and float16. Nothing was updated then.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise errors.step_in_capture(type(self).__name__)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        extension = _extension()
        extension.update_began()  # What the device waits for from here on is no computing.
        try:
            self._step()
        finally:
            extension.update_ended()
        return loss

    def _step(self) -> None:
        early = self._updates()
        try:
            later = early.settle(*self._one_of_each_device())
            early.check_gradients()
        finally:
            early.begin_step()
        self._watch_gradients()  # Of parameters that are new, or frozen no more.
        self._update_now(early.take_small(), 1.0)
        scale = self._inverse_loss_scale()
        if scale is None:
            return
        work = self._work()
        max_norm = self._settings["max_grad_norm"]
        if max_norm is not None and work:
            square = _extension().sum_of_squares([_dense(grad) for _, _, _, grad in work])
            self.grad_norm = math.sqrt(square) * scale
            coefficient = max_norm / (self.grad_norm + CLIP_EPS)
            # As torch clamps: a norm that is not a number stays one.
            scale *= 1.0 if coefficient > 1.0 else coefficient
        if later:
            self._update_now(early.later(work, scale), scale)
        else:
            self._update([(*entry[:3], entry[2].detach(), entry[3]) for entry in work], scale)
        elements = early.take_elements() + (0 if later else sum(p.numel() for _, _, p, _ in work))
        self._note_share(elements)

    def _note_share(self, elements: int) -> None:
        """Of the step's updates, split as those were that ended since the last step did."""
        with self._share_lock:
            (host, kernel), self._share = self._share, (0, 0)
        if host + kernel > 0 or elements == 0:
            on_host = elements * host // max(host + kernel, 1)
            self.share = (on_host, elements - on_host)

    def _update_now(self, updates: list[Update], scale: float) -> None:
        """Of few bytes: on a GPU by its kernel, for which the host does not wait."""
        engine = "stream" if self.engine == "hybrid" else self.engine
        self._update([update.work for update in updates], scale, engine=engine)

    def _one_of_each_device(self) -> list[torch.Tensor]:
        params = (p for group in self.param_groups for p in group["params"])
        return list({param.device: param for param in params}.values())

    def _inverse_loss_scale(self) -> float | None:
        """What gradients are multiplied by for GradScaler; None when it found an overflow.

        GradScaler leaves the unscaling to optimizers made with fused=True; the others it hands
        unscaled gradients, or does not call.
        """
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return None
        grad_scale = getattr(self, "grad_scale", None)
        return 1.0 if grad_scale is None else 1.0 / grad_scale.item()

    def _work(self) -> list[tuple]:
        """(group, index, parameter, gradient) of all that have one; checked, nothing changed."""
        params = [p for group in self.param_groups for p in group["params"]]
        self._places = {}  # Scripts may have changed the groups.
        work = [(*self._located(p), p, p.grad) for p in params if p.grad is not None]
        for _, _, param, grad in work:
            self._check(param, grad)
        if len(self._slots) > len(params):  # Scripts may have replaced parameters.
            self._updates().wait_on_host()
            self._slots = {p: self._slots[p] for p in params if p in self._slots}
        return work

    def _check(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        name = type(self).__name__
        if grad.layout is not torch.strided:
            raise errors.sparse_gradient(name)
        if param.device.type not in ("cpu", "cuda"):
            raise errors.unsupported_tensor(name, f"parameters on {param.device}")
        for tensor in (param, grad):
            # Such as DTensor: the memory is that of other tensors.
            if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                raise errors.unsupported_tensor(name, type(tensor).__name__)
            if tensor.dtype not in PARAM_DTYPES:
                raise errors.unsupported_dtype(name, tensor.dtype)

    def _update(
        self,
        work: list[tuple],
        grad_scale: float,
        after: int | None = None,
        engine: str | None = None,
    ) -> None:
        """Updates the parameters of `work`: (group, index, parameter, its weights, gradient).

        `after`: the CUDA stream, as a number, that is to wait for the updates; None: the current
        one, which must be in order for the gradients either way. `engine`: in place of `engine`.
        """
        extension, steps, copies, hypers = _extension(), [], [], {}
        counters: dict[torch.Tensor, torch.Tensor] = {}
        again = []
        for group, index, param, weights, grad in work:
            if param in counters:  # Twice in a group: one update after the other, as torch does.
                again.append((group, index, param, weights, grad))
                continue
            hyper = hypers.get(id(group))
            if hyper is None:
                hyper = hypers[id(group)] = _hyper(extension, group)
            dense = _dense(weights)
            if not extension.is_dense(weights):
                copies.append((weights, dense))
            if grad.stride() != dense.stride() or not extension.is_dense(grad):
                grad = torch.empty_like(dense, dtype=grad.dtype).copy_(grad)
            slot, state = self._slot_of(param, dense), vars(self)["state"][param]
            counters[param] = state["step"]
            steps.append(
                extension.ParameterStep(
                    dense,
                    grad.detach(),
                    slot.residual,
                    slot.checksums,
                    slot.exp_avg,
                    slot.exp_avg_sq,
                    int(state["step"].item()) + 1,
                    index,
                    hyper,
                )
            )
        if not steps:
            return
        if copies or again:
            after = None  # Operators on the current stream go on with the results.
        engine, seed = engine or self.engine, self._settings["seed"]
        share = extension.adamw_step(steps, engine, grad_scale, seed, after)
        with self._share_lock:
            self._share = (self._share[0] + share[0], self._share[1] + share[1])
        for counter in counters.values():  # Not before: what failed was no step.
            counter += 1
        for weights, dense in copies:
            weights.copy_(dense)
        # Written outside torch: a backward that saved one of them must notice.
        torch.autograd.graph.increment_version(list(counters))
        if again:
            self._update(again, grad_scale, engine=engine)

    def _slot_of(self, param: torch.Tensor, weights: torch.Tensor | None = None) -> Slot:
        """The parameter's slot; made at its first update, and anew when it became another.

        `weights`: what is updated; None: what the parameter has now.

        What the user put into `state` (a loaded checkpoint, another optimizer's) is taken over.
        """
        state, slot = vars(self)["state"][param], self._slots.get(param)
        like = _dense(param.detach()) if weights is None else weights
        if slot is None or slot.kind != kind_of(like):
            slot = self._slots[param] = Slot.zeros(_extension(), like, self.moment_dtype)
        elif "exp_avg" not in state or "exp_avg_sq" not in state:  # Removed: it begins anew.
            slot = self._slots[param] = slot.with_zero_moments(_extension(), like)
        for name in ("exp_avg", "exp_avg_sq"):
            ours = getattr(slot, name)
            if state.get(name) is not ours:
                if name in state:
                    ours.copy_(state[name])
                state[name] = ours
        if not isinstance(state.get("step"), torch.Tensor) or state["step"].device.type != "cpu":
            state["step"] = _counter(state.get("step", 0.0))
        return slot

    def _choose_moments(self) -> torch.dtype:
        """float32 where host memory has room for all parameters' states, else bfloat16."""
        params = [p for group in self.param_groups for p in group["params"]]
        if not params:
            return torch.float32
        needed = sum(bytes_needed(p, torch.float32) for p in params)
        fits = needed <= _extension().host_bytes_left(params[0])
        return torch.float32 if fits else torch.bfloat16

    def _masters(self) -> dict[torch.Tensor, torch.Tensor]:
        masters = {p: slot.master(_extension(), p) for p, slot in self._slots.items()}
        return {p: master for p, master in masters.items() if master is not None}

    def state_dict(self):
        """As torch.optim.AdamW's, which it loads in; with a float32 "master" for each parameter in
        half precision. Moments are the live tensors, as torch's are.
        """
        self.synchronize()
        # As the first hook after torch's own work, so that the script's see the whole result.
        hook = self.register_state_dict_post_hook(_HostOptimizer._add_masters, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def _add_masters(self, result: dict) -> None:
        masters, index = self._masters(), -1
        for group in self.param_groups:
            for param in group["params"]:
                index += 1
                if param in masters and index in result["state"]:
                    result["state"][index] = {
                        **result["state"][index],
                        "master": masters[param],
                    }

    def load_state_dict(self, state_dict):
        """Takes a state_dict of this class, of torch.optim.Adam or of torch.optim.AdamW.

        Raises:
            ValueError: Groups or shapes do not fit.
        """
        self.synchronize()
        whole = {}

        # Torch would cast moments to the parameter's type and device, so it gets the groups only.
        # Both hooks are nearest to its work: the script's see the whole, before and after.
        def groups_only(_, state_dict):
            self._check_loadable(state_dict)
            whole.update(state_dict)
            return {**state_dict, "state": {}}

        def states(_):
            self._load_states(whole)

        hooks = (
            self.register_load_state_dict_pre_hook(groups_only),
            self.register_load_state_dict_post_hook(states, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_loadable(self, state_dict: dict) -> None:
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise errors.unsupported_option(type(self).__name__, "amsgrad")
        for param, saved in self._saved_states(state_dict):
            for name in ("exp_avg", "exp_avg_sq", "master"):
                if name in saved and saved[name].shape != param.shape:
                    raise errors.state_of_other_shape(name, saved[name].shape, param.shape)

    def _saved_states(self, state_dict: dict) -> list[tuple[torch.Tensor, dict]]:
        """What was saved for each parameter; nothing where the groups do not fit, as torch says."""
        saved_groups = state_dict["param_groups"]
        if [len(g["params"]) for g in saved_groups] != [
            len(g["params"]) for g in self.param_groups
        ]:
            return []
        ids = [i for group in saved_groups for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        pairs = zip(params, ids, strict=True)
        return [(p, state_dict["state"][i]) for p, i in pairs if state_dict["state"].get(i)]

    def _load_states(self, state_dict: dict) -> None:
        self._slots.clear()
        for param, saved in self._saved_states(state_dict):
            self._load(param, saved)

    def _load(self, param: torch.Tensor, saved: dict) -> None:
        state = self.state[param]
        state.update({k: v for k, v in saved.items() if k not in ("master", "max_exp_avg_sq")})
        state["step"] = _counter(saved.get("step", 0.0))
        slot = self._slot_of(param)
        if "master" in saved:
            slot.set_master(_extension(), saved["master"])


class Adam(_HostOptimizer, torch.optim.Adam):
    """Adam as `torch.optim.Adam` computes it in float32: decay is added to the gradient.

    Args:
        params, lr, betas, eps, weight_decay, maximize, foreach, fused, decoupled_weight_decay: As
            torch.optim.Adam takes them.
        Others: As for `AdamW`.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        *,
        foreach=None,
        maximize=False,
        capturable=False,
        differentiable=False,
        fused=None,
        decoupled_weight_decay=False,
        engine="auto",
        moments="auto",
        max_grad_norm=None,
        accumulation_steps=None,
        seed=0,
    ):
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            engine=engine,
            moments=moments,
            max_grad_norm=max_grad_norm,
            accumulation_steps=accumulation_steps,
            seed=seed,
        )


class AdamW(Adam, torch.optim.AdamW):
    """AdamW as `torch.optim.AdamW` computes it in float32, with masters and moments in host memory.

    A parameter takes 12 bytes of host memory with float32 moments and 8 with bfloat16 ones (its
    weight included), whatever the type of its weights: bfloat16 weights are the upper half of their
    float32 masters, and the other 16 bits lie beside the moments. Weights changed by others
    (load_state_dict, copy_, a swap with averages) are noticed by their content, 2048 elements at a
    time; their masters follow, and a swap away and back loses nothing.

    Under a budget that does not hold everything updates go on after step(): each operator that uses
    a weight waits for that weight's. Call synchronize() before you read moments, or hand a weight's
    address to a kernel of your own that is no operator.

    Args:
        params, lr, betas, eps, weight_decay, maximize, foreach, fused: As torch.optim.AdamW takes
            them; `foreach` and `fused` choose nothing here.
        amsgrad, capturable, differentiable: Only False.
        engine: Where updates run: "host" (its cores), "stream" (a GPU kernel that reads and writes
            host memory), "hybrid" (both, each as it has time) or "auto". All give the same bits.
            Parameters on the CPU, or on the simulated device, use the host. Default "auto": what
            PYTORCH_TRAINSTREAM_CONF says in `optimizer`; else hybrid for parameters on a GPU.
        moments: "float32", "bfloat16" (with stochastic rounding) or "auto": what the configuration
            says in `moments`; else float32 where host memory has room for the states of all
            parameters. Default "auto".
        max_grad_norm: Clips the global 2-norm of the gradients, as torch.nn.utils.clip_grad_norm_
            does, without changing them; the norm is in `grad_norm` afterwards. Default None.
        accumulation_steps: How many backward passes make a step: a promise that lets each update
            start during the last of them, as soon as its gradient is finished, and frees the
            gradient; it uses the learning rate of that moment. Nothing is divided by it. With
            max_grad_norm updates wait for the norm, and it changes nothing. Not for GradScaler,
            which must see all gradients first, nor for DistributedDataParallel, which averages them
            later. Default None: updates begin in step().
        seed: Of stochastic rounding. Default 0.

    Attributes:
        grad_norm: 2-norm of the last step's gradients, unscaled; None without max_grad_norm.
        share: Elements that the host's cores and the GPU's kernel updated in the last step.

    Raises:
        ValueError: An argument is out of range or not supported.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        *,
        maximize=False,
        foreach=None,
        capturable=False,
        differentiable=False,
        fused=None,
        engine="auto",
        moments="auto",
        max_grad_norm=None,
        accumulation_steps=None,
        seed=0,
    ):
        # Not through Adam's, which names the kind of decay: torch.optim.AdamW does so itself.
        _HostOptimizer.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            engine=engine,
            moments=moments,
            max_grad_norm=max_grad_norm,
            accumulation_steps=accumulation_steps,
            seed=seed,
        )


def _hyper(extension, group: dict):
    if group.get("amsgrad"):  # Set since the group was added.
        raise errors.unsupported_option("AdamW", "amsgrad")
    beta1, beta2 = group["betas"]
    return extension.AdamWHyperparameters(
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group.get("decoupled_weight_decay", True)),
        bool(group["maximize"]),
    )


def _counter(steps) -> torch.Tensor:
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose memory holds its elements and nothing else."""
    if _extension().is_dense(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _check_choice(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise errors.bad_argument(name, value, ", ".join(allowed))


def _configured(key: str) -> str:
    """The configuration's value of `key`; "auto" while trainstream is off."""
    from trainstream import _switch

    state = _switch.current()
    return "auto" if state is None else getattr(state.config, key)


@functools.cache  # Each parameter of each step asks, and loading compares versions.
def _extension():
    from trainstream import _switch

    return _switch.load_extension()
