"""What wrap() takes and refuses before anything is changed, and which blocks it finds."""

import io
import time

import pytest
import torch
from real_runner import needs_extension, run_real
from torch import nn

import trainstream
from trainstream import _progress
from trainstream.explicit import _blocks

pytestmark = needs_extension


def small(optimizer=torch.optim.AdamW):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, optimizer(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"offload": "yes"}, "for offload; allowed: auto, True, False"),
        ({"offload": 1}, "for offload"),
        ({"moment_dtype": "float16"}, "for moment_dtype; allowed: auto, float32, bfloat16"),
        ({"distributed": "yes"}, "for distributed; allowed: auto, True, False"),
        ({"max_grad_norm": 0}, "for max_grad_norm"),
        ({"max_grad_norm": True}, "for max_grad_norm"),
        ({"accumulation_steps": 1.5}, "for accumulation_steps; allowed: None or 1, 2"),
        ({"prefetch_depth": -1}, "for prefetch_depth; allowed: 0, 1, 2"),
        ({"activation_offload": 1.5}, "for activation_offload"),
        ({"activation_offload": "some"}, "for activation_offload"),
        ({"device": "tpu"}, "for device; allowed: auto, cuda"),
        ({"offload": False, "moment_dtype": "bfloat16"}, "offload=False rules out"),
        ({"offload": False, "accumulation_steps": 2}, "offload=False rules out"),
        ({"vram": "lots"}, "for key 'vram'"),
    ],
)
def test_bad_options_are_refused_by_name_before_anything_is_switched_on(keys, message):
    model, optimizer = small()
    with pytest.raises(ValueError, match=message):
        trainstream.wrap(model, optimizer, **keys)
    assert not trainstream.is_enabled() and type(optimizer) is torch.optim.AdamW


def test_what_is_no_model_or_no_optimizer_is_refused():
    model, optimizer = small()
    with pytest.raises(TypeError, match="takes a torch.nn.Module"):
        trainstream.wrap(optimizer, model)
    with pytest.raises(TypeError, match="torch.optim.Optimizer or None, got list"):
        trainstream.wrap(model, [optimizer])
    for call in (trainstream.unwrap, trainstream.session):
        with pytest.raises(trainstream.TrainstreamError, match="is not wrapped"):
            call(model)


def test_refusals_that_need_a_device_change_nothing(tmp_path):
    script = """
    from torch import nn
    def attempt(model, optimizer, *more, **keys):
        before = type(optimizer), [p.untyped_storage()._cdata for p in model.parameters()]
        try:
            trainstream.wrap(model, optimizer, "sim", *more, **keys)
        except (ValueError, MemoryError, trainstream.TrainstreamError) as error:
            print(f"{type(error).__name__}: {error}")
        after = type(optimizer), [p.untyped_storage()._cdata for p in model.parameters()]
        assert before == after and not optimizer._optimizer_step_post_hooks

    trainstream.enable(device="sim", vram="8MiB")
    model = nn.Sequential(*[nn.Linear(600, 600, bias=False) for _ in range(4)])
    adam = lambda **keys: torch.optim.Adam(model.parameters(), **keys)
    attempt(model, adam(amsgrad=True), offload=True)
    attempt(model, torch.optim.SGD(model.parameters(), lr=1.0), offload=True)
    attempt(model, adam(), param_offload=[0, 4])
    attempt(model, adam(), param_offload=1.5)
    attempt(model, adam(), blocks="layers")
    attempt(model, adam(), param_offload=True, blocks=[])
    attempt(model, adam(), param_offload=False, offload=True)
    attempt(model, adam(), distributed=True)
    vars(trainstream).pop("spill_activations", None)  # As in a version that has none.
    attempt(model, adam(), activation_offload=True, param_offload=True, offload=True)
    attempt(model, adam(), vram="9MiB")
    model, optimizer = trainstream.wrap(model, adam(), offload=True, param_offload=True)
    try:
        trainstream.wrap(model, optimizer)
    except trainstream.TrainstreamError as error:
        print(error)
    for index in (4, -1, True, "0"):
        try:
            trainstream.session(model).pager.page(index)
        except ValueError as error:
            print(error)
    """
    lines = run_real(tmp_path, script, None).stdout.splitlines()
    expected = [
        "ValueError: the optimizer cannot be kept in host memory: amsgrad=True is not supported",
        "ValueError: the optimizer cannot be kept in host memory: SGD is neither",
        "ValueError: bad value 4 for param_offload; allowed: indices of blocks, 0 to 3",
        "ValueError: bad value 1.5 for param_offload; allowed: auto, True, False, a share",
        "ValueError: bad value 'layers' for blocks; allowed: the path of a module",
        "ValueError: no blocks were found to page",
        "BudgetError: trainstream: the run cannot fit: device memory must hold 10.99 MiB at once",
        "TrainstreamError: distributed=True, but there is no process group",
        "TrainstreamError: activation_offload=1.0 needs trainstream.spill_activations",
        "TrainstreamError: already switched on with vram:8388608",
        "this model is wrapped already",
    ]
    for line, beginning in zip(lines, expected, strict=False):
        assert line.startswith(beginning), lines
    assert len(lines) == len(expected) + 4
    assert all("for the index of a block" in line for line in lines[-4:])


def test_memory_made_before_is_taken_over_as_it_was_shared(tmp_path):
    """Two weights in one flat memory, one of another order, gradients and a buffer."""
    script = """
    from torch import nn
    model = nn.ModuleDict({"a": nn.Linear(600, 600), "b": nn.Linear(600, 600)})
    flat = torch.randn(2 * 600 * 600 + 7)
    model["a"].weight.data = flat[7:7 + 600 * 600].view(600, 600)
    model["b"].weight.data = flat[7 + 600 * 600:].view(600, 600).t()
    model["conv"] = nn.Conv2d(256, 256, 3).to(memory_format=torch.channels_last)
    model.register_buffer("mean", torch.randn(300000))
    model["a"].weight.grad = torch.randn(600, 600)
    before = [(digest(t), t.stride(), id(t)) for t in model.state_dict(keep_vars=True).values()]
    grad = digest(model["a"].weight.grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainstream.wrap(model, optimizer, "sim", vram="64MiB")
    from trainstream import _C
    tensors = model.state_dict(keep_vars=True)
    assert [(digest(t), t.stride(), id(t)) for t in tensors.values()] == before
    assert digest(model["a"].weight.grad) == grad and _C.is_managed(model["a"].weight.grad)
    large = [t for t in tensors.values() if t.numel() * 4 >= 2**20]
    assert len(large) == 4 and all(map(_C.is_managed, large))
    shared = [model[n].weight.untyped_storage()._cdata for n in "ab"]
    assert shared[0] == shared[1] and not _C.is_managed(flat)
    moved = [e for e in trainstream.session(model).events if e.what == "moved"]
    print(moved[0].numbers["bytes"] == 4 * (flat.numel() + 300000 + 256 * 256 * 9 + 600 * 600))
    """
    assert run_real(tmp_path, script, None).stdout == "True\n"


def test_activations_are_spilled_around_each_forward_and_no_longer_after_unwrap(tmp_path):
    script = """
    import contextlib, copy, pickle
    from torch import nn
    log = []

    @contextlib.contextmanager
    def spill_activations(share):
        log.append(share)
        try:
            yield
        finally:
            log.append("out")

    trainstream.spill_activations = spill_activations
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    trainstream.wrap(model, None, "sim", activation_offload=0.5)
    model(torch.ones(2, 8)).sum().backward()
    try:
        model(torch.ones(2, 9))
    except RuntimeError:
        log.append("raised")
    pickle.loads(pickle.dumps(copy.deepcopy(model)))
    trainstream.unwrap(model)
    model(torch.ones(2, 8))
    print(log)
    """
    assert run_real(tmp_path, script, None).stdout == "[0.5, 'out', 0.5, 'out', 'raised']\n"


class Layer(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))


class Decoder(nn.Module):
    def __init__(self, layers, experts=0):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(layers))


def names(model, named=None):
    return [block.name for block in _blocks.find(model, named)]


def test_blocks_are_the_longest_list_of_one_class_not_one_inside_it():
    assert names(Decoder(3, experts=9)) == ["layers.0", "layers.1", "layers.2"]
    both = nn.ModuleDict({"encoder": Decoder(2), "decoder": Decoder(3)})
    assert names(both) == [f"encoder.layers.{i}" for i in range(2)] + [
        f"decoder.layers.{i}" for i in range(3)
    ]
    assert names(nn.Sequential(nn.Embedding(8, 4), Decoder(2), nn.Linear(4, 4))) == [
        "1.layers.0",
        "1.layers.1",
    ]
    assert names(small()[0]) == ["0", "2"]
    mixed = nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Linear(4, 4))
    assert names(mixed) == ["0", "2"]
    assert names(nn.Linear(4, 4)) == []


def test_blocks_that_are_named_are_taken_and_must_not_lie_in_each_other():
    model = Decoder(3, experts=2)
    assert names(model, "layers") == ["layers.0", "layers.1", "layers.2"]
    assert names(model, ["layers.1", "embed"]) == ["layers.1", "embed"]
    for wrong in ("layer", "layers.0.linear", ["layers.0", "layers.0.experts"], ["nothing"]):
        with pytest.raises(ValueError, match="for blocks; allowed"):
            _blocks.find(model, wrong)


def test_what_blocks_share_belongs_to_none():
    model = Decoder(3)
    assert [len(block.tensors) for block in _blocks.find(model, None)] == [2, 2, 2]
    model.layers[2].linear.weight = model.layers[0].linear.weight
    model.layers[1].linear.weight = nn.Parameter(model.embed.weight[:4])  # Of the same memory.
    assert [len(block.tensors) for block in _blocks.find(model, None)] == [1, 1, 1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal_after_a_while_and_goes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for stream in (Terminal(), io.StringIO()):
        with _progress.Progress("moving the model", 2**30, stream) as progress:
            progress.add(2**20)
            assert stream.getvalue() == ""
            now[0] += 1
            progress.add(2**20)
        shown = stream.getvalue()
        if not stream.isatty():
            assert shown == ""
            continue
        assert shown.startswith("\rtrainstream: moving the model: 2.00 MiB of 1.00 GiB")
        assert "\n" not in shown and shown.endswith(" \r")
