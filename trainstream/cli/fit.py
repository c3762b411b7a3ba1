"""`trainstream fit`: what a model needs, what of it a budget keeps on the device, what limits."""

import argparse
import json
from dataclasses import dataclass

import trainstream
from trainstream import config, errors
from trainstream._text import format_bytes, format_rate, format_seconds
from trainstream.cli import estimate, model_shape
from trainstream.cli.console import Console
from trainstream.cli.estimate import Job, Need, Rates, Traffic

EXAMPLES = """\
examples:
  trainstream fit config.json --tokens 8192
  trainstream fit path/to/model --tokens 8192 --vram 24GiB --ram 100GiB
  trainstream fit config.json --tokens 8192 --vram 24GiB --to-device 49.2 --to-host 49.2 \\
      --host-memory 177 --tflops 500
  trainstream fit config.json --tokens 8192 --optimizer host --moments bfloat16 --json
The model is a Hugging Face config.json, a folder with one, or the name of one that is in Hugging
Face's cache; weights are not read and no network is asked. Rates that are not given are those of
`trainstream info`, where there is a GPU. "At best" is a bound: copies hidden wherever they can be.
"Foretold" adds up the phases of a step, in each of which copies hide behind computing or not.
"""
_GIVEN = 1.0  # Operations a second where a step's seconds are given in their place.
_FLAGS = {
    "computing": "--tflops or --stock-step",
    "the link to the device": "--to-device",
    "the link to the host": "--to-host",
    "host memory": "--host-memory",
}
_KINDS = {
    "stock": ("states", "weights", "gradients", "kept"),
    "host": ("gradients", "weights", "kept"),
}
_TEXTS = {
    "states": "moments",
    "weights": "weights",
    "gradients": "gradients",
    "kept": "kept activations",
}


@dataclass(frozen=True)
class Plan:
    """What waits in host memory under a budget.

    Args:
        device_bytes, host_bytes: The budget.
        paged: Bytes of each kind that do not stay on the device.
        fixed: Device bytes that are needed at once and cannot be paged meanwhile.
        inflight: Device bytes for blocks on their way.
    """

    device_bytes: int
    host_bytes: int
    paged: dict[str, int]
    fixed: int
    inflight: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="config.json, or a folder with one")
    add("--tokens", type=_count, required=True, metavar="N", help="of one step: batch x length")
    add("--length", type=_count, metavar="N", help="of one sequence; default 2048, or --tokens")
    add("--vram", metavar="SIZE", help="budget: a size such as 24GiB, a percent of the GPU, auto")
    add("--ram", default="auto", metavar="SIZE", help="limit of host memory; default auto")
    add("--dtype", choices=list(estimate.DTYPE_BYTES), default="bfloat16", help="of the weights")
    add("--no-checkpointing", action="store_true", help="every activation is kept for backward")
    add("--optimizer", choices=("stock", "host"), default="stock", help="torch's AdamW, or ours")
    add("--moments", choices=("float32", "bfloat16"), default="float32", help="of ours")
    for name, text in (
        ("to-device", "the link to the device, while copies go both ways"),
        ("to-host", "the link to the host, likewise"),
        ("host-memory", "what cores and copies together get from host memory"),
    ):
        add(f"--{name}", type=_rate, metavar="GB/s", help=text)
    add("--tflops", type=_rate, metavar="T", help="what computing reaches, 10^12 a second")
    add("--stock-step", type=_rate, metavar="S", help="or: a step's seconds where it all fits")
    add("--json", action="store_true", help="print JSON: bytes and seconds")


def _count(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**40):
        raise argparse.ArgumentTypeError(errors.no_count(text))
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(errors.no_rate(text))
    return value


def execute(options: argparse.Namespace, console: Console) -> int:
    """Prints what is needed, then what fits, then what limits."""
    shape = model_shape.load(options.model)
    job = Job(
        shape,
        options.tokens,
        options.length or min(2048, options.tokens),
        options.dtype,
        not options.no_checkpointing,
        options.optimizer,
        options.moments,
    )
    config.with_keywords(config.Config(), {"vram": options.vram or "auto", "ram": options.ram})
    need = estimate.need(job)
    if not options.json:
        _print_need(job, need, console)
    profile = _profile()
    plan = None
    if options.vram or profile is not None:
        plan = make_plan(job, need, trainstream.Budget(options.vram or "auto", options.ram))
    rates, flops = _rates(options, profile), _flops(options, job)
    terms = []
    if plan is not None:
        late = estimate.late_share(job, plan.device_bytes)
        moved = estimate.traffic(job, plan.paged, late)
        terms = estimate.terms(moved, rates, flops)
        foretold = _foretell(job, plan, late, rates, flops)
        if options.json:
            console.line(json.dumps(_as_dict(shape, need, plan, moved, terms, foretold), indent=2))
        else:
            _print_plan(need, plan, console)
            _print_step(moved, terms, console)
            _print_foretold(foretold, console)
    elif options.json:
        console.line(json.dumps(_as_dict(shape, need, None, None, terms, []), indent=2))
    else:
        console.line("There is no GPU here: give --vram to see what fits.")
    return 0


def _foretell(job: Job, plan: Plan, late: float, rates: Rates, flops: float) -> list:
    """As estimate.foretell(); empty where a rate is not known, and for trainstream.optim."""
    known = rates.to_device > 0 and rates.to_host > 0 and rates.flops > 0
    if not known or job.optimizer != "stock":
        return []
    return estimate.foretell(estimate.phases(job, plan.paged, late), rates, flops)


def _print_foretold(foretold: list, console: Console) -> None:
    if foretold:
        parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in foretold)
        whole = format_seconds(sum(seconds for _, seconds in foretold))
        console.line(f"Foretold, phase by phase: {whole} a step ({parts}).")


def make_plan(job: Job, need: Need, budget) -> Plan:
    """Pages what the pager does: moments, then weights; gradients only where those do not do. With
    trainstream.optim gradients go to the cores first of all.

    Of one kind, what stays is trainstream.MemoryPlanner's choice.

    Raises:
        BudgetError: Not even with all of it in host memory. The message has the arithmetic.
    """
    paged, fault = dict.fromkeys(_TEXTS, 0), None
    if need.peak <= _usable(budget):
        _check_host(budget, paged, need)
        return Plan(budget.device_bytes, budget.host_bytes, paged, need.peak, 0)
    stays = {kind: getattr(need, kind) for kind in _TEXTS}
    for kind in _KINDS[job.optimizer]:
        blocks = _blocks(job, kind, need)
        if not blocks:
            continue
        stays[kind] = 0
        fixed = _fixed(need, stays)
        try:
            planner = trainstream.MemoryPlanner(budget, blocks, fixed)
            chosen = planner.initial_paged()
        except errors.BudgetError as refused:
            fault = refused
            paged[kind] = sum(blocks)
            continue
        paged[kind] = sum(blocks[index] for index in chosen)
        _check_host(budget, paged, need)
        inflight = planner.inflight_bytes
        return Plan(budget.device_bytes, budget.host_bytes, paged, fixed, inflight)
    raise fault


def _usable(budget) -> int:
    """Nine tenths, as the planner has it: what allocators lose comes on top of an estimate."""
    return budget.device_bytes * 9 // 10


def _blocks(job: Job, kind: str, need: Need) -> list[int]:
    """Bytes of each piece that moves as one: a layer's or an end's tensors of one kind."""
    shape, size = job.shape, estimate.DTYPE_BYTES[job.dtype]
    if kind == "kept":
        return [need.kept // shape.layers] * shape.layers
    ends = [shape.embedding_parameters + shape.rest_parameters, shape.head_parameters]
    parts = [count * size for count in (*ends, *shape.layer_parameters) if count]
    if kind == "states":
        return 2 * parts if need.states else []
    return parts


def _fixed(need: Need, stays: dict[str, int]) -> int:
    """Device bytes that are needed at once, where so many of each kind stay.

    Logits are there before any gradient; a layer's own work is there beside all of them.
    """
    at_loss = stays["kept"] + need.logits
    # Without checkpointing `working` is part of `kept`.
    at_end = stays["gradients"] + need.working
    return stays["weights"] + stays["states"] + max(at_loss, at_end)


def _check_host(budget, paged: dict[str, int], need: Need) -> None:
    budget.check(paged=sum(paged.values()) + _host_alone(need, paged))


def _host_alone(need: Need, paged: dict[str, int]) -> int:
    """Of trainstream.optim's states, what a paged weight does not already take."""
    return max(0, need.host_states - paged["weights"]) if need.host_states else 0


def _profile():
    """The hardware profile where there is a GPU; None elsewhere, and without an extension."""
    try:
        import torch

        return trainstream.profile_hardware() if torch.cuda.is_available() else None
    except (ImportError, RuntimeError):
        return None


def _rates(options: argparse.Namespace, profile) -> Rates:
    def rate(given: float | None, measured: float) -> float:
        return given * 1e9 if given else measured

    both = profile.both if profile else None
    flops = (options.tflops or 0) * 1e12
    return Rates(
        rate(options.to_device, both.to_device if both else 0),
        rate(options.to_host, both.to_host if both else 0),
        rate(options.host_memory, profile.host_memory_bytes_per_second if profile else 0),
        _GIVEN if options.stock_step else flops,
    )


def _flops(options: argparse.Namespace, job: Job) -> float:
    """Operations of a step; its seconds (at one a second) where those are given."""
    if options.stock_step:
        return options.stock_step
    return model_shape.flops_of_step(job.shape, job.tokens, job.length, job.checkpointing)


def _print_need(job: Job, need: Need, console: Console) -> None:
    shape = job.shape
    console.line(
        f"{shape.parameters / 1e9:.2f} B parameters ({shape.parameters}): {shape.model_type}, "
        f"{shape.layers} layers of {shape.hidden}, vocabulary {shape.vocabulary}"
    )
    if shape.note:
        console.line(f"note: {shape.note}")
    kept = "kept activations: " + ("layers' inputs" if job.checkpointing else "all of them")
    rows = [
        ("weights", need.weights),
        ("gradients", need.gradients),
        ("moments", need.states),
        (kept, need.kept),
        ("one layer's work in backward", need.working),
        ("logits, loss and their gradient", need.logits),
        ("stock's peak" if need.states else "peak without a budget", need.peak),
    ]
    if need.host_states:
        rows.append(("trainstream.optim, in host memory", need.host_states))
    table = [(name, format_bytes(size), f"{size / 1e9:.2f} GB") for name, size in rows]
    console.table(f"a step of {job.tokens} tokens", ("", "binary", "decimal"), table)


def _print_plan(need: Need, plan: Plan, console: Console) -> None:
    budget = format_bytes(plan.device_bytes)
    if not any(plan.paged.values()):
        console.line(f"It fits the budget of {budget}: nothing moves.")
    sizes = {
        "states": need.states,
        "gradients": need.gradients,
        "weights": need.weights,
        "kept": need.kept,
    }
    rows = [
        (_TEXTS[kind], format_bytes(sizes[kind] - plan.paged[kind]), format_bytes(plan.paged[kind]))
        for kind in _TEXTS
        if sizes[kind]
    ]
    host = sum(plan.paged.values()) + _host_alone(need, plan.paged)
    if need.host_states:
        alone = _host_alone(need, plan.paged)
        rows.append(("trainstream.optim", format_bytes(0), format_bytes(alone)))
    title = f"under a budget of {budget}"
    console.table(title, ("", "stays on the device", "waits in host memory"), rows)
    console.line(f"host memory: {format_bytes(host)} of {format_bytes(plan.host_bytes)}")


def _print_step(moved: Traffic, terms: list, console: Console) -> None:
    if not terms:
        console.line(
            f"A step moves {format_bytes(moved.to_device)} to the device and "
            f"{format_bytes(moved.to_host)} to the host. Without rates there is no bound: give "
            "--to-device, --to-host, --host-memory and --tflops."
        )
        return
    rows = [_row_of_term(*term) for term in terms]
    console.table("a step, at best", ("", "amount", "rate", "time"), rows)
    name, _, _, seconds = max(terms, key=lambda term: term[3])
    missing = [f"{term} ({_FLAGS[term]})" for term in _not_known(moved, terms)]
    if missing:
        console.line(
            f"A step takes {format_seconds(seconds)} at least, for {name} alone; not known: "
            f"{', '.join(missing)}."
        )
    else:
        sentence = f"{name} limits: at best {format_seconds(seconds)} a step."
        console.line(sentence[0].upper() + sentence[1:])


def _not_known(moved: Traffic, terms: list) -> list[str]:
    """Terms without a rate that are not nothing."""
    nothing = {
        "the link to the device": moved.to_device == 0,
        "the link to the host": moved.to_host == 0,
        "host memory": moved.host_memory == 0,
    }
    known = {term[0] for term in terms}
    return [name for name in _FLAGS if name not in known and not nothing.get(name)]


def _row_of_term(name: str, amount: float, rate: float, seconds: float) -> tuple[str, ...]:
    took = format_seconds(seconds)
    if name != "computing":
        return name, format_bytes(int(amount)), format_rate(rate), took
    if rate == _GIVEN:
        return name, "", "as given", took
    return name, f"{amount / 1e12:.0f} T operations", f"{rate / 1e12:.0f} T/s", took


def _as_dict(
    shape, need: Need, plan: Plan | None, moved: Traffic | None, terms: list, foretold: list
) -> dict:
    limit = max(terms, key=lambda term: term[3]) if terms else None
    return {
        "parameters": shape.parameters,
        "need_bytes": vars(need),
        "plan": None if plan is None else vars(plan),
        "moved_bytes": None if moved is None else vars(moved),
        "seconds": {name: seconds for name, _, _, seconds in terms},
        "limit": None if limit is None else limit[0],
        "step_seconds": None if limit is None else limit[3],
        "phase_seconds": dict(foretold),
        "foretold_seconds": sum(seconds for _, seconds in foretold) if foretold else None,
        "not_known": [] if moved is None else _not_known(moved, terms),
        "note": shape.note,
    }
